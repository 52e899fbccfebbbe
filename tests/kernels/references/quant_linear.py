"""The product in numpy: takes the tiles apart, quantises the activations, and multiplies group by group.

The sums over a group are integers and therefore exact; what is left is summed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bough.kernels.quant_linear.packed import GROUP, LINE, Format, PackedWeight

Floats = npt.NDArray[np.float64]
TILE_ROWS = 16
NIBBLES = (Format.Q4, Format.Q4_MIN)
OFFSETS = (Format.Q4_MIN, Format.Q8_MIN)


def scales_per_group(form: Format) -> int:
    return 2 if form is Format.Q8_HALF else 1


def size_of(form: Format, outputs: int, inputs: int) -> int:
    """The bytes of a packed weight, by the layout of its tiles."""
    if form.is_float:
        tile = inputs * TILE_ROWS * (4 if form is Format.F32 else 2)
    else:
        numbers = scales_per_group(form) + (form in OFFSETS)
        codes = inputs // GROUP * TILE_ROWS * (GROUP // 2 if form in NIBBLES else GROUP)
        tile = -(-(codes + inputs // GROUP * TILE_ROWS * 2 * numbers) // LINE) * LINE
    return -(-outputs // TILE_ROWS) * tile


class Codes(NamedTuple):
    """A quantised weight taken apart: `scales * codes + offsets` are its values."""

    codes: npt.NDArray[np.int64]  # [n, groups, parts of a group, inputs of a part]
    scales: Floats  # [n, groups, parts]
    offsets: Floats  # [n, groups]


class Tokens(NamedTuple):
    """Quantised activations: `scales * codes` are their values, but for the rounding."""

    codes: npt.NDArray[np.int64]  # [tokens, groups, 32], from -127 to 127
    scales: Floats  # [tokens, groups]


def quant_linear(
    x: torch.Tensor,  # [tokens, in] float32
    parts: Sequence[PackedWeight],  # whose outputs stand side by side
    bias: torch.Tensor | None = None,  # [out]
) -> torch.Tensor:
    """`x @ weight.T + bias`"""
    product = torch.from_numpy(np.concatenate([_product(x, part) for part in parts], axis=1)).float()
    return product if bias is None else product + bias


def dequantize(weight: PackedWeight) -> torch.Tensor:
    """The values that the packed weight stands for. [n, k] float32"""
    if weight.format.is_float:
        return torch.from_numpy(_floats(weight))
    codes, scales, offsets = decode(weight)
    values = (codes * scales[..., None]).reshape(weight.n, -1, GROUP) + offsets[..., None]
    return torch.from_numpy(values.reshape(weight.n, weight.k)).float()


def quantize_tokens(x: npt.NDArray[np.float32]) -> Tokens:
    """8 bits for each activation, one scale for 32; rounds as the compiled kernels do, in float32."""
    groups = x.reshape(len(x), -1, GROUP)
    largest = np.abs(groups).max(axis=2)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    codes = np.rint(groups * inverse[..., None]).astype(np.int64)
    return Tokens(codes, (largest / np.float32(127)).astype(np.float64))


def decode(weight: PackedWeight) -> Codes:
    """Takes the tiles apart."""
    form = weight.format
    tiles, groups, parts = -(-weight.n // TILE_ROWS), weight.k // GROUP, scales_per_group(form)
    lines = groups * (4 if form in NIBBLES else 8)
    blob = weight.blob.reshape(tiles, -1)
    codes = _codes(form, blob[:, : lines * LINE].reshape(tiles, groups, -1, TILE_ROWS, 4))
    halves = blob[:, lines * LINE :].copy().view(np.float16).astype(np.float64)
    scales = halves[:, : groups * parts * TILE_ROWS].reshape(tiles, groups, parts, TILE_ROWS)
    offsets = np.zeros((tiles, groups, TILE_ROWS))
    if form in OFFSETS:
        offsets = halves[:, groups * TILE_ROWS : 2 * groups * TILE_ROWS].reshape(tiles, groups, TILE_ROWS)
    return Codes(
        codes.transpose(0, 3, 1, 2, 4).reshape(-1, groups, parts, GROUP // parts)[: weight.n],
        scales.transpose(0, 3, 1, 2).reshape(-1, groups, parts)[: weight.n],
        offsets.transpose(0, 2, 1).reshape(-1, groups)[: weight.n],
    )


def _codes(form: Format, lines: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """[tiles, groups, lines, rows, 4] bytes to [tiles, groups, 8, rows, 4] codes."""
    if form not in NIBBLES:
        return lines.view(np.int8).astype(np.int64)
    codes: npt.NDArray[np.int64] = np.concatenate([lines & 15, lines >> 4], axis=2).astype(np.int64)
    return codes - 8 if form is Format.Q4 else codes


def _product(x: torch.Tensor, weight: PackedWeight) -> Floats:
    activations = x.numpy()
    if weight.format.is_float:
        exact: Floats = activations.astype(np.float64) @ _floats(weight).astype(np.float64).T
        return exact
    codes, scales, offsets = decode(weight)
    tokens = quantize_tokens(activations)
    split = tokens.codes.reshape(len(x), *codes.shape[1:])
    dots = np.einsum("tgpi,ngpi->tngp", split, codes)
    scaled = np.einsum("tngp,ngp,tg->tn", dots, scales, tokens.scales)
    shifted: Floats = scaled + np.einsum("tg,ng->tn", tokens.codes.sum(axis=2) * tokens.scales, offsets)
    return shifted


def _floats(weight: PackedWeight) -> npt.NDArray[np.float32]:
    if weight.format is Format.BF16:
        pairs = weight.blob.view(np.uint16).reshape(-1, weight.k // 2, TILE_ROWS, 2).astype(np.uint32) << 16
        tiles = pairs.view(np.float32).transpose(0, 1, 3, 2).reshape(-1, weight.k, TILE_ROWS)
    elif weight.format is Format.F16:
        tiles = weight.blob.view(np.float16).reshape(-1, weight.k, TILE_ROWS).astype(np.float32)
    else:
        tiles = weight.blob.view(np.float32).reshape(-1, weight.k, TILE_ROWS)
    return np.ascontiguousarray(tiles.transpose(0, 2, 1).reshape(-1, weight.k)[: weight.n])
