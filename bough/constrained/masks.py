"""Bits of a token mask: word i // 32, bit i % 32, as xgrammar and llguidance both lay them out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def allow_only(tokens: tuple[int, ...], mask: npt.NDArray[np.int32]) -> None:
    """A mask of these tokens and nothing else."""
    mask.fill(0)
    allow_also(tokens, mask)


def allow_also(tokens: tuple[int, ...], mask: npt.NDArray[np.int32]) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))


def allowed_tokens(mask: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """The ids whose bit is set, ascending."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits)


def tail_bits(size: int) -> int:
    """The bits of the last word that stand for tokens, as the signed number that a word is."""
    bits = 0xFFFFFFFF >> (-size % 32)
    return bits - (1 << 32) if bits >= 1 << 31 else bits
