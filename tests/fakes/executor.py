"""An executor without a model that notices every mistake in the page accounts.

Its "keys and values" are the tokens themselves, written to and read back through page tables. The next token is a hash
of the whole sequence that a row reads, so a page that was lent twice, freed too early or swapped wrongly changes the
output. `oracle` gives the output that an undisturbed run must have.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from bough.core.plan import BatchPlan, Limits, PositionLogprobs, StepResult, TokenMasks, mask_words

VOCAB = 97


def next_token(sequence: np.ndarray, allowed: np.ndarray | None = None) -> int:
    """The token after a sequence; under a mask the next one that it allows, -1 when it allows none."""
    token = zlib.crc32(np.ascontiguousarray(sequence, dtype=np.int32).tobytes()) % VOCAB
    if allowed is None:
        return token
    tokens = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")[:VOCAB])
    return -1 if not len(tokens) else int(tokens[np.searchsorted(tokens, token) % len(tokens)])


def oracle(prompt: list[int], max_new: int, stops: frozenset[int] = frozenset()) -> list[int]:
    """What the fake model generates after `prompt`, with the stop token, if one ends it."""
    sequence = list(prompt)
    for _ in range(max_new):
        sequence.append(next_token(np.array(sequence, dtype=np.int32)))
        if sequence[-1] in stops:
            break
    return sequence[len(prompt) :]


@dataclass
class Done:
    result: StepResult | None  # None: its masks have not come yet

    def ready(self) -> bool:
        return self.result is not None

    def wait(self) -> StepResult:
        assert self.result is not None, "the step still waits for its masks"
        return self.result


class FakeExecutor:
    def __init__(
        self,
        *,
        rows: int = 8,
        pages: int = 64,
        page_size: int = 1,
        context_length: int = 64,
        chunk_tokens: int = 16,
        even_tokens: int = 1,
        late_plans: bool = False,
    ) -> None:
        self._limits = Limits(
            rows, page_size, (pages,), context_length, VOCAB, chunk_tokens, "fake", even_tokens, late_plans
        )
        self.page_size = page_size
        self.slots = np.full((pages + 1) * page_size, -1, dtype=np.int32)
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.last_token: dict[int, int] = {}
        self.generated: dict[int, int] = {}
        self.prompt_lens: dict[int, int] = {}
        self.scored: dict[int, bool] = {}
        self.unmasked: tuple[BatchPlan, Done] | None = None  # the step that waits for its masks
        self.poisoned_rows: set[int] = set()
        self.plans: list[BatchPlan] = []
        self.computed_tokens = 0
        self.postponed = 0  # pieces of work for quiet moments

    def limits(self) -> Limits:
        return self._limits

    def idle(self) -> bool:
        if not self.postponed:
            return False
        self.postponed -= 1
        return True

    def close(self) -> None:
        pass

    def launch(self, plan: BatchPlan) -> Done:
        assert self.unmasked is None, "masks come before the next launch"
        assert len({setup.row for setup in plan.setups}) == len(plan.setups)
        self.plans.append(plan)
        for setup in plan.setups:
            self.generated[setup.row], self.prompt_lens[setup.row] = setup.generated, setup.prompt_len
            self.scored[setup.row] = setup.logprobs is not None
            self.tables[setup.row] = setup.pages[0].tolist()
            self.lengths[setup.row] = setup.length
        for edit in plan.edits:
            table = self.tables[edit.row]
            assert edit.first + len(edit.pages) <= len(table), "an edit reaches past the row's table"
            for i, page in enumerate(edit.pages.tolist()):
                old = self._page(table[edit.first + i])
                assert (old == self._page(page)).all() or edit.first + i >= self.lengths[edit.row] // self.page_size
                table[edit.first + i] = page
        self._append_pages(plan)
        self._store(plan)
        if plan.masked is None:
            return Done(self._read(plan, {}))
        assert plan.masked.any() and not (plan.masked & ~plan.sample).any()
        self.unmasked = plan, Done(None)
        return self.unmasked[1]

    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        assert self.unmasked is not None
        (plan, done), self.unmasked = self.unmasked, None
        assert plan.step == step and plan.masked is not None
        assert masks.words.shape == (int(plan.masked.sum()), mask_words(VOCAB))
        done.result = self._read(plan, dict(zip(np.flatnonzero(plan.masked).tolist(), masks.words, strict=True)))

    def _page(self, page: int) -> np.ndarray:
        return self.slots[page * self.page_size : (page + 1) * self.page_size]

    def _append_pages(self, plan: BatchPlan) -> None:
        offset = 0
        for row, count in zip(plan.rows.tolist(), plan.new_page_counts[0].tolist(), strict=True):
            self.tables[row] += plan.new_pages[0][offset : offset + count].tolist()
            offset += count
        assert offset == len(plan.new_pages[0])

    def _store(self, plan: BatchPlan) -> None:
        """Every row writes before any row reads, as in each layer of a real model."""
        offset = 0
        written: set[int] = set()
        for row, query, given in zip(plan.rows.tolist(), plan.query_lens.tolist(), plan.given.tolist(), strict=True):
            tokens = plan.tokens[offset : offset + given].tolist()
            offset += given
            if given < query:
                tokens = [self.last_token[row], *tokens]
            assert len(tokens) == query
            for token in tokens:
                position = self.lengths[row]
                slot = self.tables[row][position // self.page_size] * self.page_size + position % self.page_size
                assert slot >= self.page_size, "page 0 belongs to nobody"
                assert slot not in written, "two rows of one plan write to one place"
                written.add(slot)
                self.slots[slot] = token
                self.lengths[row] += 1
            self.computed_tokens += query
        assert offset == len(plan.tokens)
        if not len(plan.tokens):
            self._check_apart(plan, written)

    def _check_apart(self, plan: BatchPlan, written: set[int]) -> None:
        """In a plan of decodes alone, no row reads what another one writes: executors may attend as they store."""
        for row in plan.rows.tolist():
            read = set(self._places(row).tolist())
            assert len(read & written) == 1, "a decode reads what another one of its plan writes"

    def _places(self, row: int) -> np.ndarray:
        positions = np.arange(self.lengths[row])
        table = np.array(self.tables[row])
        return table[positions // self.page_size] * self.page_size + positions % self.page_size

    def _sequence(self, row: int) -> np.ndarray:
        return self.slots[self._places(row)]

    def _read(self, plan: BatchPlan, masks: dict[int, np.ndarray]) -> StepResult:
        tokens, bad = [], []
        output: dict[int, PositionLogprobs] = {}
        for index, row in enumerate(plan.rows.tolist()):
            sequence = self._sequence(row)
            assert (sequence >= 0).all(), "a row reads a place that nobody wrote"
            if plan.sample[index]:
                assert len(sequence) == self.prompt_lens[row] + self.generated[row]
                token = self.next_token(row, sequence, masks.get(index))
                self.generated[row] += 1
                self.last_token[row] = max(token, 0)
                tokens.append([self.last_token[row]])
                bad.append(row in self.poisoned_rows or token < 0)
                if self.scored[row]:
                    output[index] = _scores(np.array([self.last_token[row]], dtype=np.int32))
        inputs = {w.index: self._input_logprobs(plan, w) for w in plan.input_logprobs}
        return StepResult(
            plan.step,
            np.array(tokens, dtype=np.int32).reshape(-1, 1),
            np.ones(len(tokens), dtype=np.int32),
            np.array(bad, dtype=np.bool_),
            output,
            inputs,
        )

    def next_token(self, row: int, sequence: np.ndarray, allowed: np.ndarray | None = None) -> int:
        return next_token(sequence, allowed)

    def _input_logprobs(self, plan: BatchPlan, want) -> PositionLogprobs:  # type: ignore[no-untyped-def]
        """The "logprob" of a prompt token is minus its value."""
        row = int(plan.rows[want.index])
        start = self.lengths[row] - int(plan.query_lens[want.index]) + want.first
        known = [*self._sequence(row).tolist(), want.next_token]
        targets = np.array(known[start + 1 : start + 1 + want.count], dtype=np.int32)
        assert len(targets) == want.count and (targets >= 0).all()
        return _scores(targets)


def _scores(tokens: np.ndarray) -> PositionLogprobs:
    empty = np.zeros((len(tokens), 0), dtype=np.float32)
    return PositionLogprobs(tokens, -tokens.astype(np.float32), empty, empty.astype(np.int32), empty)
