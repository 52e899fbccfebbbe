# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
"""The normaliser in Triton: one program for a row, so that a row's sum has the same order in any batch, and nothing as
large as the logits is written."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


def log_normaliser(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, for logits that are contiguous in each row."""
    n, vocab_size = logits.shape
    peaks, log_sums = torch.empty((2, n, 1), dtype=torch.float32, device=logits.device)
    if n:
        assert logits.stride(1) == 1
        _normalise[(n,)](logits, logits.stride(0), peaks, log_sums, VOCAB_SIZE=vocab_size, BLOCK=BLOCK, num_warps=8)
    return peaks, log_sums


@triton.jit(do_not_specialize_on_alignment=["peaks", "log_sums"])
def _normalise(
    logits,
    stride: int,
    peaks, log_sums,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        at = start + offset
        values = tl.load(logits + row * stride + at, mask=at < VOCAB_SIZE, other=float("-inf")).to(tl.float32)
        tops = tl.maximum(tops, values)
    peak = tl.max(tops, 0)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB_SIZE, BLOCK):
        at = start + offset
        values = tl.load(logits + row * stride + at, mask=at < VOCAB_SIZE, other=float("-inf")).to(tl.float32)
        sums += tl.exp(values - peak)
    tl.store(peaks + row, peak)
    tl.store(log_sums + row, tl.log(tl.sum(sums, 0)))
