"""The families of models that there are: those of this package, and those that other packages register.

A package registers a `ModelFamily` class through the entry point group `bough.models`. Its modules are imported when a
checkpoint names an architecture that is not built in. Decoders that are in neither run through `transformers`' modules.
Torch is loaded only when a model is built.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily
from bough.models.gemma3 import Gemma3
from bough.models.llama import Llama
from bough.models.mistral import Mistral
from bough.models.qwen2 import Qwen2
from bough.models.qwen3 import Qwen3
from bough.models.qwen3_moe import Qwen3Moe
from bough.models.transformers_family import ARCHITECTURE, TransformersFamily

if TYPE_CHECKING:
    import torch

    from bough.distributed.topology import Topology
    from bough.kernels.ops import PackedOps
    from bough.layers.placement import AllReduce
    from bough.models.base import CausalLM

BUILT_IN: tuple[ModelFamily, ...] = (Llama(), Mistral(), Qwen2(), Qwen3(), Qwen3Moe(), Gemma3())
GROUP = "bough.models"
FALLBACK = TransformersFamily()


def supported_architectures() -> tuple[str, ...]:
    """The Hugging Face class names that can be served."""
    return tuple(name for family in _families() for name in family.architectures)


def find_family(name: str, where: str = "", impl: str = "auto") -> ModelFamily:
    """The family of an architecture, or of a config.json's model type. `where` begins the error message. `impl` is
    `--model-impl`."""
    if name == ARCHITECTURE or impl == "transformers":
        return FALLBACK
    for family in _families():
        if name in family.architectures or name in family.model_types:
            return family
    known, hint = ", ".join(supported_architectures()), ""
    if FALLBACK.knows(name):
        if impl == "auto":
            return FALLBACK
        hint = " --model-impl transformers may run it, more slowly."
    raise ModelError(
        f"{where}architecture {name!r} is not supported; supported are {known}. Other packages can add models "
        f"(entry point group {GROUP}).{hint}"
    )


def runs_transformers(config: ModelConfig) -> bool:
    """Whether `transformers`' modules compute the model."""
    return config.architecture == ARCHITECTURE


def find_gguf_family(name: str, where: str = "") -> ModelFamily:
    """The family of a GGUF file's architecture."""
    for family in _families():
        if name == family.gguf_architecture:
            return family
    known = [family.gguf_architecture for family in _families() if family.gguf_architecture]
    raise ModelError(f"{where}GGUF architecture {name!r} is not supported; supported are {', '.join(known)}.")


def build_model(
    config: ModelConfig,
    topology: Topology,
    dtype: torch.dtype,
    device: torch.device,
    all_reduce: AllReduce | None = None,
    quantization: str = "none",
    deterministic: bool = False,
    packed_ops: PackedOps | None = None,
) -> CausalLM:
    """A model with memory for this rank's weights, not yet filled. More than one rank needs `all_reduce`. With
    `packed_ops` the weights are packed for those."""
    family = find_family(config.architecture)
    from bough.kernels.registry import ops_for
    from bough.layers.placement import Placement, no_reduce
    from bough.layers.schemes.packed import PackedScheme
    from bough.layers.schemes.registry import scheme_for

    reduce = all_reduce or no_reduce
    if packed_ops is not None:
        packed = PackedScheme(quantization)
        placement = Placement(topology, dtype, device, reduce, packed_ops, packed.weight, packed.table)
    else:
        ops = ops_for(device, deterministic)
        placement = Placement(topology, dtype, device, reduce, ops, scheme_for(quantization))
    return family.build(config, placement)


def _families() -> Iterator[ModelFamily]:
    yield from BUILT_IN
    yield from _registered()


@functools.cache
def _registered() -> tuple[ModelFamily, ...]:
    """The families of other packages."""
    families = []
    for entry in entry_points(group=GROUP):
        package = entry.dist.name if entry.dist else entry.value
        try:
            family = entry.load()()
        except Exception as error:
            raise ModelError(
                f"The package {package} registers the model {entry.name!r}, which cannot be loaded "
                f"({type(error).__name__}: {error}); repair or uninstall it."
            ) from error
        if not isinstance(family, ModelFamily):
            raise ModelError(
                f"The package {package} registers {entry.value!r} as a model, which is no subclass of "
                "bough.models.family.ModelFamily."
            )
        families.append(family)
    return tuple(families)
