"""Fills a model with weights: opens the right source and copies each slot's part into place, one piece at a time.

Everything that can be wrong with a checkpoint is found before the first byte is copied. Beside the model itself, only
one piece of one tensor is in memory at any moment.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from tqdm import tqdm

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology
from bough.kernels.quant_linear.packed import FillingWeight, Format, format_for, of_tables, packed_bytes
from bough.layers.weights import Form, WeightSlot
from bough.loader.catalogue import home
from bough.loader.ctranslate2 import read_tensors
from bough.loader.gguf_file import GgufFile
from bough.loader.locate import ModelFiles, gguf_parts
from bough.loader.packed_cache import PackedCache, cache_path
from bough.loader.quantization import quantization_of
from bough.loader.quantized import plain_source
from bough.loader.source import UNFIT, DummySource, GgufSource, Index, NamedSource, TensorSource, WeightSource
from bough.loader.vectors import BARE_NAMES
from bough.models.names import NESTED, Stored, find_tensors, nested
from bough.models.registry import FALLBACK, find_family, find_gguf_family
from bough.native.library import cpu_name

PIECE_VALUES = 16 << 20  # larger tensors are read a band of rows at a time
PIECE_ROWS = 16  # packed weights take whole tiles of rows
PICKLES = ("*.bin", "*.pt", "*.pth")
UNUSED_IN_GGUF = ("attn_rot_embd.weight", "attn_rot_embd.freqs")  # frequencies that follow from the configuration


def open_source(
    files: ModelFiles, config: ModelConfig, load_format: str = "auto", device: torch.device | None = None
) -> WeightSource:
    """The weights of a model. `auto` takes what its files hold; `dummy` makes random ones, on `device` itself."""
    if load_format == "dummy":
        return DummySource(config, device=device)
    if files.gguf is not None and load_format in ("auto", "gguf"):
        file = GgufFile.open(files.gguf)
        family = find_gguf_family(str(file.metadata.get("general.architecture")), f"{files.gguf}: ")
        tensors = find_tensors(family.gguf_names(config), file.tensors, keep_others=False)
        _refuse_unknown(file, tensors.values(), config.num_layers)
        return NamedSource(GgufSource(file), tensors)
    if files.ctranslate2 is not None and load_format == "auto":
        mapped = {name: torch.from_numpy(tensor) for name, tensor in read_tensors(files.ctranslate2).items()}
        stands = find_family(config.architecture).names(config)
        return NamedSource(TensorSource(mapped), find_tensors(stands, mapped, keep_others=False))
    if files.safetensors and load_format in ("auto", "safetensors", "mistral"):
        source = plain_source(files, getattr(torch, config.dtype))
        family = find_family(config.architecture)
        if family is FALLBACK:
            return TensorSource(FALLBACK.convert(config, {name: source.read(name) for name in source.names()}))
        names = family.names(config)
        if not NESTED.items() <= names.items() and any(name.startswith(tuple(NESTED)) for name in source.names()):
            names = nested(names)  # a multimodal checkpoint around the family's
        if config.vectors is not None and config.causal:
            names = {**BARE_NAMES, **names}
        return NamedSource(source, find_tensors(names, source.names(), keep_others=True))
    kind = "weights" if load_format == "auto" else f"{load_format} weights"
    pickled = next((path.name for end in PICKLES for path in files.folder.glob(end)), None)
    what = (
        f"save {pickled} as safetensors, it is not read because pickled weights can run code"
        if pickled
        else ("choose another model, or --load-format dummy for random ones")
    )
    raise ModelError(f"{files.folder} holds no {kind}; {what}.")


def _refuse_unknown(file: GgufFile, known: Iterable[Stored], layers: int) -> None:
    """A layer with a tensor that has no place in the model is another model's."""
    used = {part.name for at in known for part in at.parts or (at,)}
    for name in file.tensors.keys() - used:
        block, _, rest = name.removeprefix("blk.").partition(".")
        if name.startswith("blk.") and block.isdigit() and int(block) < layers and rest not in UNUSED_IN_GGUF:
            text = f"{file.path} holds {name}, which this architecture has no place for; it is not supported."
            raise ModelError(text)


def packed_cache(files: ModelFiles, quantization: str, *, keep: bool = True) -> PackedCache | None:
    """Where the packed weights of these files are kept; None for what has no files, or is dequantised. Without `keep`
    it is only read."""
    weights = list(gguf_parts(files.gguf) if files.gguf is not None else files.safetensors)
    if quantization == "none" or not weights:
        return None
    if files.gguf is None and files.config is not None and quantization_of(files) is not None:
        weights.append(files.config)  # says what the numbers mean
    return PackedCache(cache_path(home(), weights, quantization, cpu_name()), keep=keep)


def kept_forms(source: WeightSource, *, fp8: bool) -> Callable[[str], Form | None] | None:
    """The forms in which tensors can be kept, by name; without `fp8` only those of integers. None: there are none."""

    def form_of(name: str) -> Form | None:
        form = source.form(name)
        return form if fp8 or form is None or form.kind != "fp8" else None

    return form_of if any(form_of(name) for name in source.names()) else None


def packed_formats(slots: Iterable[WeightSlot]) -> Counter[Format]:
    """How many of the loaded weights are packed in which format."""
    return Counter(slot.packing.weight.format for slot in slots if slot.packing is not None)


def load_weights(
    slots: Iterable[WeightSlot],
    source: WeightSource,
    *,
    progress: bool,
    device: torch.device,
    cache: PackedCache | None = None,
) -> None:
    """Copies each slot's part of the checkpoint to its target on `device`. `progress` allows a bar on a terminal. What
    is packed comes from `cache` if it is there, and goes there if not."""
    needed = list(slots)
    check_weights(needed, source)
    total = sum(slot.target.nbytes for slot in needed)
    # disable=None shows the bar on a terminal only.
    with tqdm(
        total=total, desc="Loading weights", unit="B", unit_scale=True, disable=None if progress else True
    ) as bar:
        for slot in needed:
            if slot.packing is not None:
                _fill_packed(slot, slot.packing, source, cache)
                bar.update(slot.target.nbytes)
                continue
            for first, index in _pieces(slot, source.shape(slot.name)):
                if slot.keep is not None:
                    kept = source.read_kept(slot.name, index)
                    slot.keep(first, type(kept)(*(part.to(device) for part in kept)))
                    bar.update(slot.target[first : first + len(kept[0])].nbytes)
                    continue
                # Crosses to the device in the checkpoint's own type, and is converted there.
                band = source.read(slot.name, index).to(device)
                slot.fill(first, band)
                bar.update(band.numel() * slot.target.element_size())

    if cache is not None:
        cache.save()
        for slot in needed:
            if slot.packing is not None:
                _adopt_kept(slot, slot.packing, source, cache)


def _adopt_kept(slot: WeightSlot, weight: FillingWeight, source: WeightSource, cache: PackedCache) -> bool:
    """Takes the weight from the disk if it is there as it would be packed; memory of its own is then given back."""
    kept = cache.get(slot.name, weight.outputs, weight.inputs)
    if kept is None or kept.format != weight.format_of(source.stored_type(slot.name)):
        return False
    weight.adopt(kept)
    return True


def _fill_packed(slot: WeightSlot, weight: FillingWeight, source: WeightSource, cache: PackedCache | None) -> None:
    if cache is not None and _adopt_kept(slot, weight, source, cache):
        return
    for first, index in _pieces(slot, source.shape(slot.name)):
        rows, stored = source.read_stored(slot.name, index)
        weight.store(first, rows, stored)
    if cache is not None:
        cache.add(slot.name, weight.weight)


def check_share(slots: Sequence[WeightSlot], source: WeightSource, topology: Topology) -> None:
    """Raises unless the source is that of the model of which the slots are this rank's share."""
    check_weights(slots, source)
    if topology.has_ends:
        check_ends(slots, source)
    if topology.all_groups.tp_rank == 0:
        check_biases(slots, source)


def check_weights(slots: Sequence[WeightSlot], source: WeightSource) -> None:
    """Raises unless the source has every tensor that the slots need, in its shape."""
    available = set(source.names())
    missing = [slot.name for slot in slots if slot.name not in available]
    if missing:
        told = f"The checkpoint lacks {len(missing)} of the {len(slots)} tensors that the model needs"
        raise ModelError(f"{told}, among them {missing[0]}; it is incomplete or belongs to another configuration.")
    for slot in slots:
        shape = source.shape(slot.name)
        if _part_shape(shape, slot.index) != tuple(slot.target.shape):
            part = f", [{_spelled(slot.index)}] of it" if slot.index else ""
            expected = f"the model expects {list(slot.target.shape)}"
            raise ModelError(f"Tensor {slot.name} has shape {list(shape)}{part}, {expected}; {UNFIT}.")
        form = None if slot.form is None else source.form(slot.name)
        if slot.form is not None and (form is None or form.cut(slot.index) != slot.form):
            text = f"Tensor {slot.name} is kept as {slot.form}, which the checkpoint does not have"
            raise ModelError(f"{text}; start another engine.")


def check_ends(slots: Iterable[WeightSlot], source: WeightSource) -> None:
    """Raises if a tensor goes on behind what the slots read of it. They are those of a rank with the end of each."""
    read: dict[str, list[int]] = {}
    for slot in slots:
        shape = source.shape(slot.name)
        ends = [part.indices(size)[1] for part, size in zip(slot.index, shape, strict=False)]
        ends += shape[len(ends) :]
        read[slot.name] = list(map(max, ends, read.get(slot.name, ends)))
    for name, ends in read.items():
        if tuple(ends) != source.shape(name):
            raise ModelError(f"Tensor {name} has shape {list(source.shape(name))}, the model expects {ends}; {UNFIT}.")


def check_biases(slots: Iterable[WeightSlot], source: WeightSource) -> None:
    """Raises if a matrix is read but not its bias, unless that is zeros, which some tools for quantisation write."""
    slot_names = {slot.name for slot in slots}
    for name in set(source.names()) - slot_names:
        if name.endswith(".bias") and f"{name[:-4]}weight" in slot_names and source.read(name).any():
            text = f"Tensor {name} has no place in this model, whose answers would be wrong without it"
            raise ModelError(f"{text}; try --model-impl transformers, or a checkpoint without this bias.")


def _part_shape(shape: tuple[int, ...], index: Index) -> tuple[int, ...]:
    if len(index) > len(shape):
        return ()
    cut = tuple(len(range(size)[part]) for size, part in zip(shape, index, strict=False))
    return cut + shape[len(index) :]


def _spelled(index: Index) -> str:
    return ", ".join(
        ":".join("" if bound is None else str(bound) for bound in (part.start, part.stop)) for part in index
    )


def _pieces(slot: WeightSlot, shape: tuple[int, ...]) -> Iterator[tuple[int, Index]]:
    """The slot as bands of rows, each small enough to hold beside the model: its first row, and what to read."""
    rows = range(shape[0])[slot.index[0]] if slot.index else range(shape[0])
    band = max(1, PIECE_VALUES // math.prod(shape[1:]) // PIECE_ROWS) * PIECE_ROWS
    for first in range(0, len(rows), band):
        taken = rows[first : first + band]
        yield first, (slice(taken.start, taken.stop), *slot.index[1:])


TABLES = ("model.embed_tokens.weight", "lm_head.weight")
# No packed weights: rounding a router's numbers would send tokens to other experts, and those of latents' keys and
# values are multiplied head by head.
UNPACKED = (".mlp.gate.weight", ".kv_b_proj.weight")


def packed_size(source: WeightSource, quantization: str) -> tuple[int, bool]:
    """Bytes of all tensors that there are, and whether some of them are quantised; matrices are packed, the rest
    becomes float32."""
    total, quantised = 0, False
    for name in source.names():
        shape = source.shape(name)
        if len(shape) != 2 or name.endswith(UNPACKED):
            total += 4 * math.prod(shape)
            continue
        how = of_tables(quantization) if name in TABLES else quantization
        form = format_for(how, source.stored_type(name), shape[1])
        total += packed_bytes(form, shape[0], shape[1])
        quantised |= not form.is_float
    return total, quantised
