"""Matrices of small integers, several to a word: AWQ's, GPTQ's and compressed-tensors'."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch

from bough.core.gguf_format import GGMLQuantizationType
from bough.kernels.quant_linear.packed import GROUP
from bough.kernels.w4_linear.reference import IntegerRows
from bough.layers.weights import Form, KeptRows
from bough.loader.formats.base import QuantizedTensor
from bough.loader.quantization import Quantization
from bough.loader.source import Index, SafetensorsSource, StoredRows

WORDS = ".qweight"  # how the names of AWQ's and GPTQ's integers end
PER_WORD = 8  # of AWQ's
# Where in one of these the outputs stand that come first, second and so on.
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
PACKED = ".weight_packed"
PACKED_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape")


class IntegerTensor(QuantizedTensor):
    """A matrix of small integers, each row in groups of equal size with a scale and a zero point."""

    bits: int
    _scales: str  # the tensor that has those of all groups, and which of its sides counts these
    _group_side = 0
    _index = ""  # the tensor that has the group of each input, where there may be one

    @abstractmethod
    def integers(self, index: Index) -> IntegerRows:
        """Some rows, or whole groups of their inputs."""

    @abstractmethod
    def zeros(self, index: Index) -> torch.Tensor:
        """The zero points alone."""

    @cached_property
    def input_groups(self) -> torch.Tensor | None:
        """The group of each input; None: groups stand one after the other."""
        if self._index not in self.files:
            return None
        groups = self.files.read(self._index).long()
        regular = torch.arange(self.shape[1]) // self.group_size
        return None if torch.equal(groups, regular) or (groups < 0).any() else groups  # -1: not in use

    @property
    def group_size(self) -> int:
        return self.shape[1] // self.files.shape(self._scales)[self._group_side]

    @cached_property
    def symmetric(self) -> bool:
        """Whether all zero points are in the middle."""
        return bool((self.zeros(()) == self.middle).all())

    @property
    def middle(self) -> int:
        return int(1 << (self.bits - 1))

    def read(self, index: Index) -> torch.Tensor:
        unit = math.lcm(self.group_size, 32) if self.input_groups is None else self.shape[1]  # whole words, too
        rows, inputs, own = self._around(index, unit)
        codes, scales, zeros = self.integers((rows, inputs))
        if self.input_groups is not None:
            return (codes.float() - zeros[:, self.input_groups]).mul_(scales[:, self.input_groups])[:, own]
        grouped = codes.view(*scales.shape, -1).float()
        return grouped.sub_(zeros[:, :, None]).mul_(scales[:, :, None]).flatten(1)[:, own]

    def form(self) -> Form | None:
        regular = self.bits == 4 and self.input_groups is None
        return Form("int4", self.shape[1], self.group_size) if regular else None

    def read_kept(self, index: Index, plane: int | None = None) -> KeptRows:
        return self.integers(index)

    def stored_type(self) -> GGMLQuantizationType | None:
        if self.input_groups is not None or self.group_size % GROUP:
            return None
        if self.bits == 4:
            return GGMLQuantizationType.Q4_0 if self.symmetric else GGMLQuantizationType.Q4_1
        return GGMLQuantizationType.Q8_0 if self.symmetric else None

    def read_stored(self, rows: slice) -> StoredRows:
        codes, scales, zeros = self.integers((rows,))
        kind, count = self.stored_type(), len(codes)
        assert kind is not None
        blocks = codes.view(count, -1, GROUP)
        repeat = self.group_size // GROUP
        numbers = [scales] if self.symmetric else [scales, -scales * zeros]
        halves = torch.stack(numbers, dim=2).half().repeat_interleave(repeat, dim=1)
        if self.bits == 4:
            content = blocks[..., : GROUP // 2] | blocks[..., GROUP // 2 :] << 4
        else:
            content = blocks ^ 128  # the same as an int8 less 128
        return torch.cat([halves.view(torch.uint8), content], dim=2).view(count, -1).numpy(), kind


def words_of(codes: slice, bits: int) -> slice:
    """The 32-bit words that have these small integers."""
    return slice(codes.start * bits // 32, -(-codes.stop * bits // 32))


def unpacked(words: torch.Tensor, bits: int, dim: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """The small integers in 32-bit words along a side, the lowest bits first, or in the `order` of their places."""
    shifts = torch.tensor(order or range(32 // bits), dtype=torch.int32) * bits
    if dim == 0:
        return (words[:, None, :] >> shifts[:, None]).bitwise_and_((1 << bits) - 1).to(torch.uint8).flatten(0, 1)
    return (words[:, :, None] >> shifts).bitwise_and_((1 << bits) - 1).to(torch.uint8).flatten(1, 2)


class AwqTensor(IntegerTensor):
    """AWQ as AutoAWQ's GEMM version stores it: integers and zero points packed along the outputs, eight to a word.
    qweight [inputs, outputs / 8], qzeros [groups, outputs / 8], scales [groups, outputs]."""

    bits = 4

    def __init__(self, files: SafetensorsSource, module: str) -> None:
        self._weight, self._zero_points, self._scales = parts = tuple(
            f"{module}.{part}" for part in ("qweight", "qzeros", "scales")
        )
        inputs, words = files.shape(self._weight)
        super().__init__(files, f"{module}.weight", parts, (words * PER_WORD, inputs))

    def integers(self, index: Index) -> IntegerRows:
        rows, inputs, groups = self._cut(index, self.group_size)
        scales = self.files.read(self._scales, (groups, rows)).float()
        return IntegerRows(self._outputs(self._weight, rows, inputs), scales.T.contiguous(), self.zeros(index))

    def zeros(self, index: Index) -> torch.Tensor:
        rows, _, groups = self._cut(index, self.group_size)
        return self._outputs(self._zero_points, rows, groups)

    def _outputs(self, name: str, rows: slice, lines: slice) -> torch.Tensor:
        """The integers of some outputs, a row for each, in those lines of the tensor."""
        start, stop = self._bounds(rows)
        first = start // PER_WORD
        words = self.files.read(name, (lines, slice(first, -(-stop // PER_WORD))))
        codes = unpacked(words.T.contiguous(), self.bits, dim=0, order=ORDER)  # whole words are the less to transpose
        return codes[start - first * PER_WORD : stop - first * PER_WORD]


def find_awq(files: SafetensorsSource, name: str, quantization: Quantization) -> AwqTensor | None:
    return AwqTensor(files, name.removesuffix(WORDS)) if name.endswith(WORDS) else None


class GptqTensor(IntegerTensor):
    """GPTQ: integers packed along the inputs, zero points along the outputs. With act-order (`desc_act`) inputs were
    quantised by their weight: `g_idx` says which group each belongs to. qweight [inputs / 8, outputs], qzeros [groups,
    outputs / 8], scales [groups, outputs], g_idx [inputs]."""

    def __init__(self, files: SafetensorsSource, module: str, bits: int, zero_shift: int) -> None:
        self._weight, self._zero_points, self._scales, self._index = (
            f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx")
        )
        self.bits, self._zero_shift = bits, zero_shift
        packed, outputs = files.shape(self._weight)
        parts = (self._weight, self._zero_points, self._scales, self._index)
        super().__init__(files, f"{module}.weight", parts, (outputs, packed * 32 // bits))

    def integers(self, index: Index) -> IntegerRows:
        rows, inputs, groups = self._cut(index, self.group_size)
        words = self.files.read(self._weight, (words_of(inputs, self.bits), rows)).T.contiguous()  # less to transpose
        scales = self.files.read(self._scales, (groups, rows)).float()
        return IntegerRows(unpacked(words, self.bits, dim=1), scales.T.contiguous(), self.zeros(index))

    def zeros(self, index: Index) -> torch.Tensor:
        rows, _, groups = self._cut(index, self.group_size)
        zeros = unpacked(self.files.read(self._zero_points, (groups,)), self.bits, dim=1)[:, rows]
        # Stored zero points are one less than they are, within their bits.
        zeros = (zeros + self._zero_shift) & ((1 << self.bits) - 1) if self._zero_shift else zeros
        return zeros.T.contiguous()


def find_gptq(files: SafetensorsSource, name: str, quantization: Quantization) -> GptqTensor | None:
    if not name.endswith(WORDS):
        return None
    return GptqTensor(files, name.removesuffix(WORDS), quantization.bits, quantization.zero_shift)


class PackedIntegers(IntegerTensor):
    """compressed-tensors' pack-quantized: integers packed along the inputs, zero points, if any, along the outputs.
    weight_packed [outputs, inputs / 8], weight_scale [outputs, groups], weight_zero_point [outputs / 8, groups],
    weight_g_idx [inputs], weight_shape [2]; a scale for each output is one group."""

    _group_side = 1

    def __init__(self, files: SafetensorsSource, module: str) -> None:
        parts = tuple(f"{module}.{part}" for part in PACKED_PARTS)
        self._packed, self._scales, self._zero_points, self._index, shape = parts
        outputs, inputs = (int(side) for side in files.read(shape))
        self.bits = next((bits for bits in (4, 8) if -(-inputs * bits // 32) == files.shape(self._packed)[1]), 0)
        super().__init__(files, f"{module}.weight", parts, (outputs, inputs))
        if not self.bits:
            raise self._wrong(f"{inputs} integers of 4 or 8 bits do not fill {files.shape(self._packed)[1]} words")

    @cached_property
    def symmetric(self) -> bool:
        return self._zero_points not in self.files

    def integers(self, index: Index) -> IntegerRows:
        rows, inputs, groups = self._cut(index, self.group_size)
        words = self.files.read(self._packed, (rows, words_of(inputs, self.bits)))
        codes = unpacked(words, self.bits, dim=1)[:, : inputs.stop - inputs.start]
        scales = self.files.read(self._scales, (rows, groups)).float()
        return IntegerRows(codes.contiguous(), scales, self.zeros(index))

    def zeros(self, index: Index) -> torch.Tensor:
        rows, _, groups = self._cut(index, self.group_size)
        if self.symmetric:
            start, stop = self._bounds(rows)
            return torch.full((stop - start, groups.stop - groups.start), self.middle, dtype=torch.uint8)
        words = self.files.read(self._zero_points, (slice(None), groups))
        return unpacked(words, self.bits, dim=0)[: self.shape[0]][rows]


def find_packed(files: SafetensorsSource, name: str, quantization: Quantization) -> PackedIntegers | None:
    if not name.endswith(PACKED) or files.dtype(name) != "I32":
        return None
    return PackedIntegers(files, name.removesuffix(PACKED))
