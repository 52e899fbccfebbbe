"""Bias, penalties, masks and normalisers of logits in Triton: one pass over each line that asks, none over others.

Every number is worked out by itself, and a row's sum has the same order in any batch, so a row's result is the same in
any batch. Only forbidden logits are written: a mask that allows nearly everything costs next to nothing.
"""

import torch
import triton
import triton.language as tl

from bough.kernels.logits.reference import PenaltyLines, PenaltyStore

BLOCK = 4096
PENALTY_BLOCK = 2048


def penalise(logits: torch.Tensor, lines: PenaltyLines, store: PenaltyStore) -> torch.Tensor:
    """As the reference, for logits that are contiguous in each row."""
    m, vocab_size = len(lines.places), logits.shape[1]
    result = torch.empty((m, vocab_size), dtype=torch.float32, device=logits.device)
    if m:
        assert logits.stride(1) == 1
        _penalise[m, triton.cdiv(vocab_size, PENALTY_BLOCK)](
            logits, logits.stride(0), lines.places, lines.rows, lines.count_slots, lines.prompt_slots, lines.bias_slots,
            store.repetition, store.frequency, store.presence, store.counts, store.prompts, store.bias, result,
            VOCAB_SIZE=vocab_size, BLOCK=PENALTY_BLOCK,
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
