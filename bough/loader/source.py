"""Where weights come from, behind one seam: tensors by name, whole or in part.

`SafetensorsSource` and `GgufSource` read checkpoints, `TensorSource` has tensors in memory, `DummySource` makes weights
up. `NamedSource` gives tensors of a checkpoint the model's names. Files are memory-mapped, so what is not asked for is
not read. Which part goes where is the model's business (`WeightSlot`).
"""

import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open

from bough.core.errors import ModelError
from bough.core.gguf_format import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology
from bough.kernels.quant_linear.packed import NATURAL
from bough.layers.weights import Form, KeptRows
from bough.loader.gguf_file import GgufFile, TensorInfo
from bough.models.names import Rows, Stored
from bough.models.registry import build_model

log = logging.getLogger(__name__)

Index = tuple[slice, ...]
StoredRows = tuple[npt.NDArray[np.uint8], GGMLQuantizationType]  # [rows, bytes of a row], and what the bytes are
FLOAT_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}
PLAIN = {kind: dtype for dtype, kind in FLOAT_TYPES.items()}
STORED_TYPES = {kind.name: kind for kind in PLAIN}  # by safetensors' names for them
UNFIT = "the weights and the configuration do not belong together"
DUMMY_SCALE = 0.02
# Prime, so that no two rows of a matrix begin at the same place in the repeated block and none are equal.
DUMMY_BLOCK = 524_309


class WeightSource(Protocol):
    """Tensors by name, e.g. `model.layers.0.self_attn.q_proj.weight`."""

    def names(self) -> Sequence[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_type(self, name: str) -> GGMLQuantizationType:
        """The type in which `read_stored` gives a matrix."""
        ...

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        """`tensor[index]`, dequantised, in memory of its own; slices must have step 1."""
        ...

    def read_stored(self, name: str, index: Index = ()) -> StoredRows:
        """The same part of a matrix as it is stored, where it can be packed so; else as floats."""
        return float_rows(self.read(name, index))

    def form(self, name: str) -> Form | None:
        """The form in which `read_kept` gives a matrix; None: it cannot."""
        return None

    def read_kept(self, name: str, index: Index = (), plane: int | None = None) -> KeptRows:
        """A part of a matrix, or of one of those that a tensor holds, in its form; columns must be whole groups."""
        raise AssertionError(f"{name} has no form to be kept in")


def float_rows(rows: torch.Tensor) -> StoredRows:
    """Rows of floats as the bytes that they are."""
    return rows.contiguous().view(torch.uint8).numpy(), FLOAT_TYPES[rows.dtype]


class SafetensorsSource(WeightSource):
    """The tensors of one or several safetensors files. One file is mapped at a time, so what was read of the others
    does not count as this process's memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._where: dict[str, tuple[Path, str, tuple[int, ...]]] = {}  # name: file, type, shape
        self._mapped: tuple[Path, Any] | None = None
        for path in paths:
            for name in self._open(path).keys():  # noqa: SIM118  it is no mapping
                part = self._part(path, name)
                self._where[name] = (path, str(part.get_dtype()), tuple(part.get_shape()))

    def names(self) -> Sequence[str]:
        return list(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def dtype(self, name: str) -> str:
        """The type of the numbers, by safetensors' name for it."""
        return self._where[name][1]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._where[name][2]

    def stored_type(self, name: str) -> GGMLQuantizationType:
        return STORED_TYPES.get(self.dtype(name), GGMLQuantizationType.F32)

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        part: torch.Tensor = self._part(self._where[name][0], name)[index]
        return part

    def _open(self, path: Path) -> Any:
        if self._mapped is None or self._mapped[0] != path:
            self._mapped = None  # before the next is mapped
            try:
                self._mapped = path, safe_open(str(path), framework="pt")
            except SafetensorError as error:
                raise ModelError(f"{path} is damaged or cut short ({error}); fetch it again.") from None
            except OSError as error:
                raise ModelError(f"{path} cannot be read ({error}); fetch it again.") from None
        return self._mapped[1]

    def _part(self, path: Path, name: str) -> Any:
        try:
            return self._open(path).get_slice(name)
        except SafetensorError as error:
            raise ModelError(f"{path}: tensor {name!r} cannot be read ({error}); fetch the file again.") from None


class TensorSource(WeightSource):
    """Tensors that are in memory already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def stored_type(self, name: str) -> GGMLQuantizationType:
        return FLOAT_TYPES.get(self._tensors[name].dtype, GGMLQuantizationType.F32)

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        return self._tensors[name][index].clone()


class GgufSource(WeightSource):
    """The tensors of one open GGUF file, by llama.cpp's names. Only the rows asked for are dequantised."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._last: TensorInfo | None = None  # that was read
        self._told: set[GGMLQuantizationType] = set()

    def names(self) -> Sequence[str]:
        return list(self._file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[name].shape

    def stored_type(self, name: str) -> GGMLQuantizationType:
        kind = self._file.tensors[name].kind
        return kind if kind in NATURAL else GGMLQuantizationType.F32

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        info = self._file.tensors[name]
        rows, columns = self._cut(info, index)
        return dequantize(rows.reshape(-1, rows.shape[-1]), info.kind).view(*rows.shape[:-1], -1)[..., columns]

    def read_stored(self, name: str, index: Index = ()) -> StoredRows:
        info = self._file.tensors[name]
        rows, columns = self._cut(info, index)
        if info.kind not in NATURAL or len(range(info.shape[-1])[columns]) < info.shape[-1]:
            self._tell_dequantised(info.kind)
            return float_rows(self.read(name, index))
        return rows, info.kind

    def _cut(self, info: TensorInfo, index: Index) -> tuple[npt.NDArray[np.uint8], slice]:
        """The bytes of the rows and blocks that `index` asks for, and which of the blocks' columns."""
        if self._last is not None and self._last is not info:
            self._file.forget(self._last)
        self._last = info
        outer = len(info.shape) - 1
        raw = self._file.raw(info).reshape(*info.shape[:-1], -1)
        start, stop, _ = (index[outer] if len(index) > outer else slice(None)).indices(info.shape[-1])
        block, size = GGML_QUANT_SIZES[info.kind]
        first, end = start // block, -(-stop // block)
        blocks = raw[index[:outer]][..., first * size : end * size]
        return blocks, slice(start - first * block, stop - first * block)

    def _tell_dequantised(self, kind: GGMLQuantizationType) -> None:
        if kind not in self._told:
            self._told.add(kind)
            log.info("weights of GGUF type %s have no native kernel; they are dequantised to float32", kind.name)


def dequantize(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> torch.Tensor:
    """Rows of bytes [rows, bytes] to rows of numbers [rows, values], as the `gguf` package does: float32, or the file's
    own plain type. CPUs multiply most formats as they are: this is for GPUs and for formats without a product."""
    if kind in PLAIN:
        return torch.from_numpy(raw.copy()).view(PLAIN[kind])
    try:
        return torch.from_numpy(quants.dequantize(raw, kind))
    except NotImplementedError:
        text = f"Weights of GGUF type {kind.name} cannot be read; use a file of another quantisation."
        raise ModelError(text) from None


class NamedSource(WeightSource):
    """The tensors of another source by the model's names: one of its planes, some rows, in another order, or
    transposed."""

    def __init__(self, source: WeightSource, tensors: Mapping[str, Stored]) -> None:
        self._source = source
        self._tensors = tensors
        self._check_rows()

    def _check_rows(self) -> None:
        """Raises if a tensor that holds several of the model's goes on behind them."""
        read: dict[str, tuple[int, int]] = {}  # rows, and those that there are
        for name, at in ((name, part) for name, each in self._tensors.items() for part in each.parts or (each,)):
            if at.rows is not None and name != "model.embed_positions.weight":  # of which a short context needs fewer
                last = at.rows.stop if isinstance(at.rows, slice) else max(at.rows) + 1
                there = self._shape(at)[-1 if self._is_flipped(at) else 0]
                read[at.name] = max(last, read.get(at.name, (0, 0))[0]), there
        for name, (rows, there) in read.items():
            if rows != there:
                shape = list(self._source.shape(name))
                expected = f"and the model expects {rows} instead of the {there}"
                raise ModelError(f"Tensor {name} has shape {shape}, {expected}; {UNFIT}.")

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        at = self._tensors[name]
        if at.parts:
            shapes = [self._whole_shape(part) for part in at.parts]
            return sum(shape[0] for shape in shapes), *shapes[0][1:]
        return self._whole_shape(at)

    def stored_type(self, name: str) -> GGMLQuantizationType:
        at = self._tensors[name]
        return GGMLQuantizationType.F32 if at.parts or at.made else self._source.stored_type(at.name)

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        at = self._tensors[name]
        if not at.parts:
            return self._read_placed(at, index)
        rows, *columns = index or (slice(None),)
        return torch.cat([self._read_placed(part, (slice(None), *columns)) for part in at.parts])[rows]

    def _read_placed(self, at: Stored, index: Index) -> torch.Tensor:
        if at.rows is None and not at.transposed:
            return self._read(at, index)
        (rows, *columns), order = self._place(at, index)
        if self._is_flipped(at):
            part = self._read(at, (*(columns or [slice(None)]), rows)).T
        else:
            part = self._read(at, (rows, *columns))
        return part if order is None else part[torch.from_numpy(order)]

    def read_stored(self, name: str, index: Index = ()) -> StoredRows:
        at = self._tensors[name]
        if at.parts or at.made or self._is_flipped(at):
            return float_rows(self.read(name, index))
        place, order = self._place(at, index)
        rows, kind = self._source.read_stored(at.name, self._with_plane(at, place))
        rows = rows if at.plane is None else rows[0]
        return rows if order is None else rows[order], kind

    def form(self, name: str) -> Form | None:
        at = self._tensors[name]
        form, plain = self._source.form(at.name), not at.transposed and at.plane is None
        return form if form is not None and plain == (form.kind != "fp4") and not (at.parts or at.made) else None

    def read_kept(self, name: str, index: Index = (), plane: int | None = None) -> KeptRows:
        at = self._tensors[name]
        place, order = self._place(at, index)
        kept = self._source.read_kept(at.name, place, at.plane)
        return kept if order is None else type(kept)(*(part[torch.from_numpy(order)] for part in kept))

    def _read(self, at: Stored, index: Index) -> torch.Tensor:
        if at.made is not None:
            whole: torch.Tensor = at.made(self._source.read(at.name))
            return whole[index]
        part = self._source.read(at.name, self._with_plane(at, index))
        return part if at.plane is None else part[0]

    def _with_plane(self, at: Stored, index: Index) -> Index:
        return index if at.plane is None else (slice(at.plane, at.plane + 1), *index)

    def _whole_shape(self, at: Stored) -> tuple[int, ...]:
        shape = self._shape(at)
        if self._is_flipped(at):
            shape = shape[::-1]
        return shape if at.rows is None else (_count(at.rows), *shape[1:])

    def _shape(self, at: Stored) -> tuple[int, ...]:
        shape = self._source.shape(at.name)
        if at.made is not None:
            return tuple(at.made(torch.empty(shape, device="meta")).shape)
        return shape if at.plane is None else shape[1:]

    def _is_flipped(self, at: Stored) -> bool:
        """A bias has no other way round."""
        shape = self._shape(at)
        return at.transposed and len(shape) == 2 and shape != at.straight

    def _place(self, at: Stored, index: Index) -> tuple[Index, npt.NDArray[np.int64] | None]:
        """Which rows and columns to read, and how to order those rows; None: they are in order."""
        rows, *columns = index or (slice(None),)
        if at.rows is None:
            return (rows, *columns), None
        if isinstance(at.rows, slice):
            taken = range(at.rows.start, at.rows.stop)[rows]
            return (slice(taken.start, taken.stop), *columns), None
        needed = np.array(at.rows[rows], dtype=np.int64)
        first = int(needed.min())
        return (slice(first, int(needed.max()) + 1), *columns), needed - first


class DummySource(WeightSource):
    """Random weights in the shape of a model: the same for the same name, whatever part is read. Norms are near one."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        model = build_model(config, Topology(), torch.float32, torch.device("meta"))
        self._shapes: dict[str, tuple[int, ...]] = {}
        for slot in model.slots():  # of which several may have parts of one tensor
            stops = [*(cut.stop for cut in slot.index), *slot.target.shape[len(slot.index) :]]
            ends = tuple(stop or size for stop, size in zip(stops, slot.target.shape, strict=True))
            self._shapes[slot.name] = tuple(map(max, ends, self._shapes.get(slot.name, ends)))
        self.dtype = dtype
        # One block for all tensors, read from another place for each name: drawing billions of numbers takes minutes.
        block = torch.randn(DUMMY_BLOCK, generator=torch.Generator().manual_seed(0)) * DUMMY_SCALE
        self._block = block.to(dtype).to(device or torch.device("cpu"))
        self._norm_base = 0.0 if config.norm_plus_one else 1.0

    def names(self) -> Sequence[str]:
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def nbytes(self) -> int:
        """Size of all tensors in the source's type."""
        return sum(map(math.prod, self._shapes.values())) * self.dtype.itemsize

    def stored_type(self, name: str) -> GGMLQuantizationType:
        return FLOAT_TYPES[self.dtype]

    def read(self, name: str, index: Index = ()) -> torch.Tensor:
        first, *others = self._shapes[name]
        rows = range(first)[index[0]] if index else range(first)
        width = math.prod(others)
        values = self._stretch(name, rows.start * width, len(rows) * width).view(len(rows), *others)
        if name.endswith("norm.weight"):
            values = values + self._norm_base
        return values[(slice(None), *index[1:])]

    def _stretch(self, name: str, start: int, count: int) -> torch.Tensor:
        """Elements start .. start + count of an endless repetition of the block, begun elsewhere for each name."""
        turned = self._block.roll(-((start + zlib.crc32(name.encode())) % DUMMY_BLOCK))
        return turned.repeat(-(-count // DUMMY_BLOCK))[:count]


def _count(rows: Rows) -> int:
    return int(rows.stop - rows.start) if isinstance(rows, slice) else len(rows)
