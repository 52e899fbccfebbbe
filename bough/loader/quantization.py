"""What a checkpoint says of its quantised weights, and whether they can be read. Torch-free.

A scheme that cannot be read is refused here, by name, before any weight is touched. Which modules are quantised is not
read from here: the tensors themselves show it, so modules that a tool has left alone need no list.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bough.core.errors import ModelError
from bough.loader.locate import ModelFiles
from bough.models.fields import Fields, read_json

INSTEAD = (
    "Take a checkpoint in one of those or a GGUF file, or the plain weights: --quantization int8 or int4 quantise them "
    "on a CPU, fp8 on a GPU."
)
MODELOPT_FILE = "hf_quant_config.json"
SECTIONS = ("quantization_config", "compression_config", "quantization")  # then an old compressed-tensors', MLX's


@dataclass(frozen=True, slots=True)
class Quantization:
    """The scheme of a checkpoint."""

    method: str  # as `quant_method` has it
    title: str  # for the log
    bits: int = 4  # of GPTQ's integers
    zero_shift: int = 0  # what GPTQ's zero points were lowered by when they were stored
    blocks: tuple[int, int] | None = None  # rows and columns of 8-bit floats that share a scale


def quantization_of(files: ModelFiles) -> Quantization | None:
    """The scheme of a model's safetensors files; None for plain weights."""
    if files.config is None:
        return None
    given = Fields(str(files.config), read_json(files.config))
    for outer in (given, given.section("text_config")):
        for name in SECTIONS:
            section = None if outer is None else outer.section(name)
            if section is not None and (name != "quantization" or "group_size" in section.values):
                usual = "mlx" if "group_size" in section.values else "unnamed"  # MLX names itself nowhere
                return _read(section, section.text("quant_method", usual))
    path = files.folder / MODELOPT_FILE
    section = Fields(str(path), read_json(path)).section("quantization") if path.is_file() else None
    return None if section is None else _read(section, "modelopt")


def _read(section: Fields, method: str) -> Quantization:
    read = METHODS.get("bitsandbytes" if method.startswith("bitsandbytes") else method.removeprefix("intel/"))
    if read is None:
        text = f"{section.where}: weights quantised with {method!r} are not supported"
        raise ModelError(f"{text}; supported are {', '.join(METHODS)}. {INSTEAD}")
    return read(section)


def _refuse(section: Fields, what: str, known: str) -> ModelError:
    return ModelError(f"{section.where}: {what} is not supported; supported are {known}.")


def _choice(section: Fields, field: str, default: str, known: tuple[str, ...]) -> str:
    """The field's value, which must be one of those."""
    value = section.text(field, default)
    if value not in known:
        raise _refuse(section, f"{field} {value!r}", ", ".join(known))
    return value


def _bits(section: Fields, known: tuple[int, ...], field: str = "bits") -> int:
    value = section.integer(field)
    if value not in known:
        raise _refuse(section, f"{field} {value}", " and ".join(map(str, known)))
    return value


def _pair(section: Fields, field: str) -> tuple[int, int] | None:
    value = section.values.get(field)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(side, int) and side > 0 for side in value):
        raise ModelError(f"{section.where}: {field} must be two whole numbers above 0, got {value!r}.")
    return value[0], value[1]


def _fp8(section: Fields) -> Quantization:
    _choice(section, "fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    blocks = _pair(section, "weight_block_size")
    return Quantization("fp8", f"FP8 in blocks of {blocks[0]} x {blocks[1]}" if blocks else "FP8", blocks=blocks)


COMPRESSED = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mixed-precision", "dense",
)  # fmt: skip
COMPRESSED_NUMBERS = {"int": (4, 8), "float": (4, 8)}


def _compressed_tensors(section: Fields) -> Quantization:
    _choice(section, "format", "dense", COMPRESSED)
    for name in ("sparsity_config", "transform_config"):
        other = section.section(name)
        if other is not None and (other.values.get("config_groups") or other.text("format", "dense") != "dense"):
            raise _refuse(section, f"a {name}", "quantised weights alone")
    names, blocks = set(), None
    groups = section.section("config_groups")
    for name in () if groups is None else groups.values:
        group = groups.section(name) if groups else None
        weights = None if group is None else group.section("weights")
        if group is None or weights is None:
            continue
        _choice(group, "format", "dense", COMPRESSED)
        kind = _choice(weights, "type", "int", tuple(COMPRESSED_NUMBERS))
        bits = _bits(weights, COMPRESSED_NUMBERS[kind], "num_bits")
        here = _pair(weights, "block_structure")
        if blocks not in (None, here):
            raise _refuse(weights, f"block_structure {here} beside {blocks}", "blocks of one size")
        blocks = here or blocks
        names.add(f"{kind}{bits}")
    kinds = " and ".join(sorted(names))
    return Quantization("compressed-tensors", f"compressed-tensors {kinds}".rstrip(), blocks=blocks)


def _awq(section: Fields) -> Quantization:
    _bits(section, (4,), "bits" if "bits" in section.values else "w_bit")
    lowered = Fields(section.where, {**section.values, "version": section.text("version", "gemm").lower()})
    _choice(lowered, "version", "gemm", ("gemm",))
    return Quantization("awq", "AWQ with 4 bits")


def _gptq(section: Fields) -> Quantization:
    bits = _bits(section, (4, 8))
    form = "checkpoint_format" if section.values.get("checkpoint_format") else "format"
    version = _choice(section, form, "gptq", ("gptq", "gptq_v2"))
    if section.boolean("is_marlin_format"):
        raise _refuse(section, "is_marlin_format", "gptq, gptq_v2")
    dynamic = section.section("dynamic")
    if dynamic is not None and any(not rule.startswith("-:") for rule in dynamic.values):
        raise _refuse(section, "dynamic with bits of its own for some modules", "rules that leave modules out (-:)")
    title = f"GPTQ with {bits} bits{' and act-order' if section.boolean('desc_act') else ''}"
    return Quantization("gptq", title, bits=bits, zero_shift=1 if version == "gptq" else 0)


AUTO_ROUND = {"auto_round:auto_gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0}  # what zero points are lowered by


def _auto_round(section: Fields) -> Quantization:
    """Packed as AWQ or GPTQ have it; layers may have bits of their own, of which 16 are plain weights."""
    _choice(section, "data_type", "int", ("int",))
    packing = _choice(section, "packing_format", "auto_round:auto_gptq", ("auto_round:auto_awq", *AUTO_ROUND))
    bits = _bits(section, (4, 8) if packing in AUTO_ROUND else (4,))
    others = section.section("extra_config")
    for name in () if others is None else others.values:
        layer = others.section(name) if others else None
        if layer is not None and layer.integer("bits", bits) not in (bits, 16):
            raise _refuse(layer, f"bits {layer.integer('bits')} beside {bits}", "the same bits or 16")
    title = f"AutoRound with {bits} bits"
    if packing not in AUTO_ROUND:
        return Quantization("awq", title)
    return Quantization("gptq", title, bits=bits, zero_shift=AUTO_ROUND[packing])


QUARK = {"fp8_e4m3": "FP8", "int8": "INT8", "fp4": "MXFP4"}


def _quark(section: Fields) -> Quantization:
    layers = section.section("global_quant_config")
    weights = None if layers is None else layers.section("weight")
    if weights is None:
        raise _refuse(section, "a global_quant_config without weight", f"weights of {', '.join(QUARK)}")
    return Quantization("quark", f"Quark {QUARK[_choice(weights, 'dtype', 'unnamed', tuple(QUARK))]}")


MODELOPT = {"FP8": "FP8", "FP8_PER_CHANNEL_PER_TOKEN": "FP8", "NVFP4": "NVFP4", "W4A16_NVFP4": "NVFP4"}


def _modelopt(section: Fields) -> Quantization:
    return Quantization("modelopt", f"ModelOpt {MODELOPT[_choice(section, 'quant_algo', 'unnamed', tuple(MODELOPT))]}")


def _bitsandbytes(section: Fields) -> Quantization:
    if not (section.boolean("load_in_4bit") or section.boolean("_load_in_4bit")):
        raise _refuse(section, "bitsandbytes with 8 bits", "load_in_4bit")
    kind = _choice(section, "bnb_4bit_quant_type", "fp4", ("nf4", "fp4"))
    _choice(section, "bnb_4bit_quant_storage", "uint8", ("uint8",))
    return Quantization("bitsandbytes", f"bitsandbytes {kind.upper()}")


METHODS: Mapping[str, Callable[[Fields], Quantization]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": lambda section: Quantization("mxfp4", "MXFP4"),
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "auto-round": _auto_round,
    "fbgemm_fp8": lambda section: Quantization("fp8", "FBGEMM FP8"),
    "quark": _quark,
}
