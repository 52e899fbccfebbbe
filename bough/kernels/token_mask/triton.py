# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
"""Masks in Triton: only forbidden logits are written, so a mask that allows nearly everything costs next to nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


def forbid_tokens_(logits: torch.Tensor, words: torch.Tensor, places: torch.Tensor) -> None:
    """As the reference, for logits and words that are contiguous in each row."""
    vocab_size = logits.shape[1]
    if len(places):
        assert logits.stride(1) == 1 and words.stride(1) == 1
        grid = (len(places), triton.cdiv(vocab_size, BLOCK))
        _forbid[grid](logits, logits.stride(0), words, words.stride(0), places, VOCAB_SIZE=vocab_size, BLOCK=BLOCK)


@triton.jit(do_not_specialize_on_alignment=["words", "places"])
def _forbid(
    logits,
    stride: int,
    words,
    words_stride: int,
    places,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB_SIZE
    word = tl.load(words + line * words_stride + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    row = tl.load(places + line)
    tl.store(logits + row * stride + token, float("-inf"), mask=inside & forbidden)
