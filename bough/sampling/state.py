"""What each row asked of the sampler, kept where it is used.

`SamplingState` owns, per row, the sampling parameters and counters on the device, and flags on the host which say what
a row needs: a step chooses its path from the flags alone and never reads the device. Vocabulary-wide data (token counts
for penalties, logit bias) has lines of its own. A row's state begins with `setup` and ends with the next `setup` or
with `release`. After the last row comes a scratch row, which is always greedy and belongs to nobody: it fills up
batches of fixed size, where it may stand many times. How logits become tokens is left to `sampler`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bough.core.media import MEDIA_ID
from bough.core.plan import BoolArray, IntArray, LogprobSpec, RowSetup
from bough.core.seeds import as_int64
from bough.kernels.logits.reference import NO_SLOT, PenaltyLines, PenaltyStore, count_tokens_
from bough.kernels.sampling.rows import RowParameters
from bough.sampling.custom_logit_processor import Processor, load_processor
from bough.sampling.slots import StopBars, VocabularyLines, to_device

LEAST_REPETITION = 1e-25  # of any logit, however biased, a smaller penalty could make an infinite number
TOP_P_OFF = 1.0 - 1e-6  # from here on top_p drops less than single-precision sums can tell: it keeps everything


@dataclass(frozen=True, slots=True)
class RowFlags:
    """What each row needs, on the host. [rows] each"""

    random: BoolArray  # draws a random number; otherwise it takes the best token
    ranked: BoolArray  # random, and limited by top-k or top-p
    min_p: BoolArray  # random, and limited by min-p
    repetition: BoolArray
    additive: BoolArray  # frequency or presence penalty
    biased: BoolArray
    guarded: BoolArray  # stop ids are barred until min_new_tokens
    logprobs: BoolArray
    processed: BoolArray  # by the user's own code

    @classmethod
    def none(cls, rows: int) -> RowFlags:
        return cls(*(np.zeros(rows, dtype=np.bool_) for _ in fields(cls)))

    def clear(self, rows: IntArray) -> None:
        for field in fields(self):
            getattr(self, field.name)[rows] = False

    def filtered(self, rows: IntArray) -> BoolArray:
        """Which of these rows draw from a part of the vocabulary."""
        return self.ranked[rows] | self.min_p[rows]

    def penalised(self, rows: IntArray) -> BoolArray:
        """Which of these rows count their tokens."""
        return self.repetition[rows] | self.additive[rows]

    def exact(self, rows: IntArray) -> BoolArray:
        """Which of these rows sample from numbers that 16 bits may not hold."""
        return self.penalised(rows) | self.biased[rows] | self.processed[rows]

    def adjusted(self, rows: IntArray) -> BoolArray:
        """Which of these rows sample from other logits than the model's."""
        return self.exact(rows) | self.guarded[rows]

    def special(self, rows: IntArray) -> BoolArray:
        """Which of these rows need more than the plain sampler gives: other logits, filters, or logprobs."""
        return self.adjusted(rows) | self.filtered(rows) | self.logprobs[rows]


Agree = Callable[[Tensor], Tensor]  # sampled tokens of a rank to those that all ranks go on with


def as_drawn(tokens: Tensor) -> Tensor:
    """For a rank alone."""
    return tokens


class SamplingState:
    """Parameters and counters of all rows."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str, agree: Agree = as_drawn) -> None:
        self.agree = agree
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.scratch_row = rows
        rows += 1
        self.flags = RowFlags.none(rows)
        self.logprob_specs: list[LogprobSpec | None] = [None] * rows
        self.processors: dict[int, tuple[Processor, dict[str, Any]]] = {}  # by row, with the request's `custom_params`
        self.parameters = RowParameters(  # what the kernels read of each row; `generated` is theirs to count on
            random=self._column(rows, torch.bool),
            temperature=self._column(rows, torch.float32),
            top_k=self._column(rows, torch.int64),  # the vocabulary's size: off
            top_p=self._column(rows, torch.float64),  # the client's own number: it decides on which side a sum falls
            min_p=self._column(rows, torch.float32),
            seed=self._column(rows, torch.int64),
            generated=self._column(rows, torch.int64),
        )
        self.frequency_penalty = self._column(rows, torch.float32)
        self.presence_penalty = self._column(rows, torch.float32)
        self.repetition_penalty = self._column(rows, torch.float32)
        self.bars = StopBars(rows, self.device)
        self.output_counts = VocabularyLines(rows, vocab_size, torch.float32, self.device)  # exact up to 2**24
        self.prompt_tokens = VocabularyLines(rows, vocab_size, torch.bool, self.device)
        self.bias = VocabularyLines(rows, vocab_size, torch.float32, self.device)

    def setup(self, setups: Sequence[RowSetup]) -> None:
        """Begins these rows, which are distinct; whatever they held is forgotten."""
        if not setups:
            return
        rows = np.array([s.row for s in setups], dtype=np.int32)
        self.release(rows)
        self._set_flags(rows, setups)
        self._set_columns(rows, setups)
        barred = [s for s in setups if self.flags.guarded[s.row]]
        lacking = [s.sampling.min_new_tokens - s.generated for s in barred]
        self.bars.put_up([s.row for s in barred], [self._stops(s) for s in barred], lacking)
        self._set_histories([s for s in setups if s.sampling.penalised])
        self._set_bias([s for s in setups if self.flags.biased[s.row]])

    def release(self, rows: IntArray) -> None:
        """Ends these rows: they need nothing any more."""
        self.flags.clear(rows)
        for row in rows.tolist():
            self.logprob_specs[row] = None
            self.bars.take_down(row)
            self.processors.pop(row, None)

    @property
    def penalties(self) -> PenaltyStore:
        """Penalties, and the lines that go with them, whose tensors may be others after the next setup."""
        return PenaltyStore(
            repetition=self.repetition_penalty,
            frequency=self.frequency_penalty,
            presence=self.presence_penalty,
            counts=self.output_counts.tensor,
            prompts=self.prompt_tokens.tensor,
            bias=self.bias.tensor,
        )

    def penalty_lines(self, places: npt.NDArray[np.int64], rows: IntArray) -> PenaltyLines:
        """The rows that stand at these places of a batch, with what they hold; a single copy to the device."""
        held = (self.flags.penalised(rows), self.flags.repetition[rows], self.flags.biased[rows])
        slots = (np.where(each, rows, NO_SLOT) for each in held)
        return PenaltyLines(*to_device(np.stack((places, rows, *slots)).astype(np.int64), self.device))

    def advance(self, rows: IntArray, tokens: Tensor) -> None:
        """Counts one sampled token for each of these rows, on a CPU; on devices the kernels do."""
        self.parameters.generated[torch.from_numpy(rows.astype(np.int64))] += 1
        self.count(rows, tokens)

    def count(self, rows: IntArray, tokens: Tensor) -> None:
        """The same where something else has counted how many tokens a row has, as the native kernels do."""
        held = self.flags.penalised(rows)
        if held.any():
            slots = torch.from_numpy(np.where(held, rows, NO_SLOT).astype(np.int64))
            count_tokens_(self.output_counts.tensor, slots, tokens)
        self.lift_bars(rows)

    def lift_bars(self, rows: IntArray) -> None:
        """These rows sample a token each: those that then have enough of them need nothing special for it any more."""
        for row in self.bars.count_down(rows):
            self.flags.guarded[row] = False

    def plain(self, rows: IntArray) -> bool:
        """Whether these rows are greedy or draw by temperature alone, and nobody asks for logprobs."""
        return not self.flags.special(rows).any()

    def specs(self, rows: IntArray) -> list[LogprobSpec | None] | None:
        """What logprobs these rows want; None when none of them wants any."""
        if not self.flags.logprobs[rows].any():
            return None
        return [self.logprob_specs[row] for row in rows.tolist()]

    def _column(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, dtype=dtype, device=self.device)

    def _set_flags(self, rows: IntArray, setups: Sequence[RowSetup]) -> None:
        flags, params = self.flags, [s.sampling for s in setups]
        random = np.array([not p.greedy for p in params])
        flags.random[rows] = random
        flags.ranked[rows] = random & [0 < p.top_k < self.vocab_size or p.top_p < TOP_P_OFF for p in params]
        flags.min_p[rows] = random & [p.min_p > 0.0 for p in params]
        flags.repetition[rows] = [p.repetition_penalty != 1.0 for p in params]
        flags.additive[rows] = [p.frequency_penalty != 0.0 or p.presence_penalty != 0.0 for p in params]
        flags.biased[rows] = [bool(p.logit_bias) for p in params]
        flags.guarded[rows] = [s.generated < s.sampling.min_new_tokens and bool(self._stops(s)) for s in setups]
        flags.logprobs[rows] = [s.logprobs is not None for s in setups]
        flags.processed[rows] = [s.processor is not None for s in setups]
        for s in setups:
            self.logprob_specs[s.row] = s.logprobs
            if s.processor is not None:
                self.processors[s.row] = load_processor(s.processor), s.sampling.custom_params

    def _set_columns(self, rows: IntArray, setups: Sequence[RowSetup]) -> None:
        at, params = to_device(rows.astype(np.int64), self.device), [s.sampling for s in setups]
        columns, k_off = self.parameters, self.vocab_size
        self._write(columns.random, at, (not p.greedy for p in params))
        self._write(columns.temperature, at, (1.0 if p.greedy else p.temperature for p in params))
        self._write(columns.top_k, at, (min(p.top_k, k_off) if p.top_k > 0 else k_off for p in params))
        self._write(columns.top_p, at, (p.top_p if p.top_p < TOP_P_OFF else 1.0 for p in params))
        self._write(columns.min_p, at, (p.min_p for p in params))
        self._write(columns.seed, at, (as_int64(s.seed) for s in setups))
        self._write(columns.generated, at, (s.generated for s in setups))
        self._write(self.frequency_penalty, at, (p.frequency_penalty for p in params))
        self._write(self.presence_penalty, at, (p.presence_penalty for p in params))
        self._write(self.repetition_penalty, at, (max(p.repetition_penalty, LEAST_REPETITION) for p in params))

    def _write(self, column: Tensor, at: Tensor, values: Iterable[float]) -> None:
        column.index_copy_(0, at, to_device(torch.tensor(list(values), dtype=column.dtype).numpy(), self.device))

    def _stops(self, setup: RowSetup) -> list[int]:
        return [token for token in setup.stop_ids if 0 <= token < self.vocab_size]

    def _set_histories(self, setups: Sequence[RowSetup]) -> None:
        """Counts the tokens so far, which may have come from a cached prefix."""
        if not setups:
            return
        rows = np.array([s.row for s in setups], dtype=np.int32)
        self.output_counts.clear(rows)
        self.prompt_tokens.clear(rows[self.flags.repetition[rows]])
        outputs, prompts = [], []
        for s in setups:
            if s.history is None:
                raise ValueError(f"row {s.row} has penalties but its setup carries no history")
            outputs.append((s.row, s.history[s.prompt_len :]))
            if self.flags.repetition[s.row]:
                prompt = np.unique(s.history[: s.prompt_len])
                prompts.append((s.row, prompt[prompt < MEDIA_ID]))
        self.output_counts.add_ones(*self._pairs(outputs))
        prompt_rows, prompt_tokens = self._pairs(prompts)
        seen = torch.ones(len(prompt_rows), dtype=torch.bool, device=self.device)
        self.prompt_tokens.scatter(prompt_rows, prompt_tokens, seen)

    def _set_bias(self, setups: Sequence[RowSetup]) -> None:
        if not setups:
            return
        self.bias.clear(np.array([s.row for s in setups], dtype=np.int32))
        pairs = [(s.row, token, amount) for s in setups for token, amount in s.sampling.logit_bias.items()]
        pairs = [pair for pair in pairs if 0 <= pair[1] < self.vocab_size]
        rows, tokens = (np.array([pair[i] for pair in pairs], dtype=np.int32) for i in (0, 1))
        amounts = np.array([pair[2] for pair in pairs], dtype=np.float32)
        self.bias.scatter(rows, tokens, to_device(amounts, self.device))

    def _pairs(self, lines: list[tuple[int, IntArray]]) -> tuple[IntArray, IntArray]:
        """Lines of tokens as flat (row, token) pairs; ids outside the vocabulary (media placeholders) fall away."""
        if not lines:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
        rows = np.repeat(np.array([row for row, _ in lines], dtype=np.int32), [len(tokens) for _, tokens in lines])
        tokens = np.concatenate([tokens for _, tokens in lines])
        known = (tokens >= 0) & (tokens < self.vocab_size)
        return rows[known], tokens[known]
