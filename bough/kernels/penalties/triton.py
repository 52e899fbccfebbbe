# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
"""Bias and penalties in Triton: one pass over each line that asks, whatever mixture of them it has, none over others.

Every number is worked out by itself, so a row's result is the same in any batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bough.kernels.penalties.reference import PenaltyLines, PenaltyStore

BLOCK = 2048


def penalise(logits: torch.Tensor, lines: PenaltyLines, store: PenaltyStore) -> torch.Tensor:
    """As the reference, for logits that are contiguous in each row."""
    m, vocab_size = len(lines.places), logits.shape[1]
    result = torch.empty((m, vocab_size), dtype=torch.float32, device=logits.device)
    if m:
        assert logits.stride(1) == 1
        _penalise[m, triton.cdiv(vocab_size, BLOCK)](
            logits, logits.stride(0), lines.places, lines.rows, lines.count_slots, lines.prompt_slots, lines.bias_slots,
            store.repetition, store.frequency, store.presence, store.counts, store.prompts, store.bias, result,
            VOCAB_SIZE=vocab_size, BLOCK=BLOCK,
        )  # fmt: skip
    return result


def count_tokens_(counts: torch.Tensor, slots: torch.Tensor, tokens: torch.Tensor) -> None:
    """As the reference."""
    if len(slots):
        _count[(len(slots),)](counts, slots, tokens, VOCAB_SIZE=counts.shape[1], num_warps=1)


# The lines are cut from one array, so where each begins depends on how many there are.
@triton.jit(do_not_specialize_on_alignment=["places", "rows", "count_slots", "prompt_slots", "bias_slots"])
def _penalise(
    logits,
    stride: int,
    places, rows, count_slots, prompt_slots, bias_slots, repetition, frequency, presence, counts, prompts, bias, result,
    VOCAB_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB_SIZE
    value = tl.load(logits + tl.load(places + line) * stride + token, mask=inside, other=0.0).to(tl.float32)
    biased = tl.load(bias_slots + line)
    if biased >= 0:
        value += tl.load(bias + biased * VOCAB_SIZE + token, mask=inside, other=0.0)
    counted = tl.load(count_slots + line)
    if counted >= 0:
        row = tl.load(rows + line)
        count = tl.load(counts + counted * VOCAB_SIZE + token, mask=inside, other=0.0)
        prompted = tl.load(prompt_slots + line)
        if prompted >= 0:
            asked = tl.load(prompts + prompted * VOCAB_SIZE + token, mask=inside, other=0)
            seen = (count > 0.0) | (asked != 0)
            penalty = tl.load(repetition + row)
            penalised = tl.where(value > 0.0, tl.math.div_rn(value, penalty), value * penalty)
            value = tl.where(seen, penalised, value)
        value -= count * tl.load(frequency + row)
        value -= tl.minimum(count, 1.0) * tl.load(presence + row)
    tl.store(result + line * VOCAB_SIZE + token, value, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["slots", "tokens"])
def _count(counts: tl.tensor, slots: tl.tensor, tokens: tl.tensor, VOCAB_SIZE: tl.constexpr) -> None:
    line = tl.program_id(0)
    slot = tl.load(slots + line)
    if slot >= 0:
        at = counts + slot * VOCAB_SIZE + tl.load(tokens + line)
        tl.store(at, tl.load(at) + 1.0)
