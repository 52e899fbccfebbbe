"""Turns the blocks of a GGUF tensor into numbers, to the bit as the `gguf` package does.

The formats of most files are unpacked here with torch, in 0.2 to 0.7 of the package's time on the rows of real models
(Q4_K gains most); others, such as Q4_0 and Q5_0, would gain little and go through the package. In every format a block
holds one or two float16 scales and small integers; each function below follows the layout of one format and writes one
row of `out` per block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from bough.core.errors import ModelError

Unpack = Callable[[torch.Tensor, torch.Tensor], None]  # blocks [n, block bytes] uint8, out [n, block values] float32
PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
VALUES_AT_ONCE = 1 << 20  # bounds the memory for what lies between; smaller passes are slower


def dequantize(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> torch.Tensor:
    """Rows of bytes [rows, bytes] to rows of numbers [rows, values]: float32, or the file's own plain type."""
    if kind in PLAIN:
        return torch.from_numpy(raw.copy()).view(PLAIN[kind])
    if kind not in FAST:
        return _by_package(raw, kind)
    unpack = FAST[kind]
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.reshape(-1, block_bytes)
    out = torch.empty(len(blocks), block)
    step = VALUES_AT_ONCE // block
    for first in range(0, len(blocks), step):
        # The copy makes a read-only view of the file into memory that torch may look at.
        unpack(torch.from_numpy(blocks[first : first + step].copy()), out[first : first + step])
    return out.view(len(raw), -1)


def _by_package(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> torch.Tensor:
    try:
        return torch.from_numpy(quants.dequantize(raw, kind))
    except NotImplementedError:
        raise ModelError(
            f"Weights of GGUF type {kind.name} cannot be read; use a file of another quantisation."
        ) from None


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a byte of each block. [n, 1] float32"""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, out: torch.Tensor) -> None:
    """Low halves of all bytes first, then the high ones."""
    half = packed.shape[-1]
    out[..., :half] = packed & 15
    out[..., half:] = packed >> 4


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the eight groups of a Q4_K or Q5_K block: 6-bit numbers packed into 12 bytes. Two of [n, 8, 1]"""
    scale, minimum, rest = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat((scale & 0x3F, (rest & 15) | ((scale >> 2) & 0x30)), dim=1)
    minima = torch.cat((minimum & 0x3F, (rest >> 4) | ((minimum >> 2) & 0x30)), dim=1)
    return (_half(blocks, 0) * scales)[:, :, None], (_half(blocks, 2) * minima)[:, :, None]


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales, minima = _scales_and_minima(blocks)
    _nibbles(blocks[:, 16:].view(-1, 4, 32), out.view(-1, 4, 64))
    out.view(-1, 8, 32).mul_(scales).sub_(minima)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    scales, minima = _scales_and_minima(blocks)
    _nibbles(blocks[:, 48:].view(-1, 4, 32), out.view(-1, 4, 64))
    groups = out.view(-1, 8, 32)
    fifth_bits = (blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1
    groups.add_(fifth_bits, alpha=16).mul_(scales).sub_(minima)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    _nibbles(blocks[:, :128].view(-1, 2, 64), out.view(-1, 2, 128))
    high = blocks[:, 128:192].view(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    out.view(-1, 2, 4, 32).add_(high & 3, alpha=16).sub_(32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    out.view(-1, 16, 16).mul_(scales[:, :, None])


FAST: dict[GGMLQuantizationType, Unpack] = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
