"""Which kinds of tensors each quantisation method uses, and the search for them."""

from collections.abc import Callable, Mapping

from bough.core.errors import ModelError
from bough.loader.formats import bitsandbytes, fp4, integers, scaled
from bough.loader.formats.base import QuantizedTensor
from bough.loader.quantization import Quantization
from bough.loader.source import SafetensorsSource

Finder = Callable[[SafetensorsSource, str, Quantization], QuantizedTensor | None]
FINDERS: Mapping[str, tuple[Finder, ...]] = {
    "fp8": (scaled.find,),
    "compressed-tensors": (integers.find_packed, scaled.find, fp4.find),
    "awq": (integers.find_awq,),
    "gptq": (integers.find_gptq,),
    "mxfp4": (fp4.find_experts,),
    "modelopt": (scaled.find, fp4.find),
    "bitsandbytes": (bitsandbytes.find,),
    "quark": (scaled.find, fp4.find),
}
NUMBERS = ("F8_E4M3", "F8_E5M2", "I8", "U8")  # which a weight cannot have without a scale
FOLDED = ("pre_quant_scale",)  # activations would have to be multiplied with it


def find_quantized(files: SafetensorsSource, quantization: Quantization) -> dict[str, QuantizedTensor]:
    """The quantised tensors by the model's names. Whatever is in no such tensor is plain."""
    found = {}
    for name in files.names():
        for find in FINDERS[quantization.method]:
            tensor = find(files, name, quantization)
            if tensor is not None:
                found[tensor.name] = tensor
    for name in files.names():
        if name.rpartition(".")[2] in FOLDED:
            raise ModelError(f"Tensor {name}: activations with a scale for each input are not supported.")
        if name.endswith(".weight") and name not in found and files.dtype(name) in NUMBERS:
            raise ModelError(
                f"Tensor {name} has numbers of type {files.dtype(name)} without scales that {quantization.title} would "
                "have; the weights and the quantisation config do not belong together."
            )
    return found
