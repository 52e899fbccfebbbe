"""An executor without a model that notices every mistake in the page accounts.

Its "keys and values" are the tokens themselves, written to and read back through page tables. The next token is a hash
of the whole sequence that a row reads, so a page that was lent twice, freed too early or swapped wrongly changes the
output. `oracle` gives the output that an undisturbed run must have.

With further `groups` (and how many pages each has) it does the same with their pages: a row must find in a window group
the tokens of each query's window, and in a state group the state that all tokens before make.

With `drafts` a decode guesses so many tokens itself, right and wrong ones, and writes them behind its own. It gives as
many as hold and one more, or fewer, or none, at random.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bough.core.control import (
    Command,
    CommandResult,
    CopyPagesIn,
    CopyPagesOut,
    LoadAdapter,
    MemoryTag,
    PlaceAdapter,
    ProfileStart,
    ProfileStop,
    ReadAdapter,
    Sleep,
    SwapWeights,
    TakeTensors,
    Wake,
)
from bough.core.errors import BoughError, ModelError
from bough.core.model_config import FULL_ATTENTION, KVGroup
from bough.core.plan import BatchPlan, Limits, PositionLogprobs, RowSetup, StepResult, TokenMasks, mask_words

VOCAB = 97


def next_token(sequence: np.ndarray, allowed: np.ndarray | None = None, weights: str = "") -> int:
    """The token after a sequence; under a mask the next one that it allows, -1 when it allows none."""
    token = zlib.crc32(np.ascontiguousarray(sequence, dtype=np.int32).tobytes(), len(weights)) % VOCAB
    if allowed is None:
        return token
    tokens = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little")[:VOCAB])
    return -1 if not len(tokens) else int(tokens[np.searchsorted(tokens, token) % len(tokens)])


def oracle(prompt: list[int], max_new: int, stops: frozenset[int] = frozenset(), weights: str = "") -> list[int]:
    """What the fake model generates after `prompt`, with the stop token, if one ends it."""
    sequence = list(prompt)
    for _ in range(max_new):
        sequence.append(next_token(np.array(sequence, dtype=np.int32), None, weights))
        if sequence[-1] in stops:
            break
    return sequence[len(prompt) :]


def make_groups(
    page_size: int, rows: int, windows: Sequence[tuple[int, int]], spare_states: Sequence[int]
) -> list[tuple[KVGroup, int]]:
    """Window groups of (tokens, pages), with no fewer pages than one row needs, and state groups with so many pages
    beyond one for each row."""
    groups = [(KVGroup("window", window), max(pages, 4 + -(-window // page_size))) for window, pages in windows]
    return groups + [(KVGroup("state"), rows + spare) for spare in spare_states]


class WindowGroup:
    """The tokens once more, in pages of a window group."""

    def __init__(self, index: int, group: KVGroup, pages: int, page_size: int) -> None:
        assert group.window is not None
        self.index, self.window, self.page_size = index, group.window, page_size
        self.slots = np.full((pages + 1) * page_size, -1, dtype=np.int32)
        self.tables: dict[int, list[int]] = {}

    def set_up(self, setup: RowSetup) -> None:
        self.tables[setup.row] = setup.pages[self.index].tolist()
        assert len(setup.pages[self.index]) == len(setup.pages[0])

    def append(self, plan: BatchPlan) -> None:
        ends = plan.new_page_counts[self.index].cumsum()
        for row, pages in zip(plan.rows.tolist(), np.split(plan.new_pages[self.index], ends)[:-1], strict=True):
            self.tables[row] += pages.tolist()

    def store(self, row: int, position: int, token: int) -> None:
        slot = self._slot(row, position)
        assert slot >= self.page_size, "page 0 belongs to nobody"
        self.slots[slot] = token

    def check(self, row: int, sequence: np.ndarray, queries: int) -> None:
        """All queries of the step find their windows."""
        first = max(0, len(sequence) - queries - self.window + 1)
        read = [int(self.slots[self._slot(row, position)]) for position in range(first, len(sequence))]
        assert read == sequence[first:].tolist(), "a row does not find its window"

    def _slot(self, row: int, position: int) -> int:
        return self.tables[row][position // self.page_size] * self.page_size + position % self.page_size


class StateGroup:
    """A state that depends on all tokens before: how many there are, and their checksum."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.content: dict[int, tuple[int, int]] = {0: (0, 0)}
        self.pages: dict[int, int] = {}  # by row
        self.begun_from_copies = 0

    def set_up(self, setup: RowSetup) -> None:
        own, copied = setup.pages[self.index].tolist()
        assert own > 0
        self.pages[setup.row] = own
        self.content[own] = self.content[copied]
        self.begun_from_copies += copied > 0
        assert self.content[own][0] == setup.length

    def check(self, rows: list[int], sequence: Callable[[int], np.ndarray]) -> None:
        for row in rows:
            assert self.content[self.pages[row]] == self._of(sequence(row)), "a row does not find its state"

    def advance(self, plan: BatchPlan, sequence: Callable[[int], np.ndarray]) -> None:
        ends = plan.new_page_counts[self.index].cumsum()
        for row, copies in zip(plan.rows.tolist(), np.split(plan.new_pages[self.index], ends)[:-1], strict=True):
            self.content[self.pages[row]] = self._of(sequence(row))
            for page in copies.tolist():
                self.content[page] = self.content[self.pages[row]]

    def _of(self, sequence: np.ndarray) -> tuple[int, int]:
        return len(sequence), zlib.crc32(np.ascontiguousarray(sequence, dtype=np.int32).tobytes())


@dataclass
class Done:
    result: StepResult | None  # None: its masks have not come yet

    def ready(self) -> bool:
        return self.result is not None

    def wait(self) -> StepResult:
        assert self.result is not None, "the step still waits for its masks"
        return self.result


@dataclass
class FakeTicket:
    """A command that is done at once, and says so only when it was asked a few times."""

    result: CommandResult | BoughError
    looks: int = 0

    def ready(self) -> bool:
        self.looks = max(0, self.looks - 1)
        return self.looks == 0

    def wait(self) -> CommandResult:
        self.looks = 0
        if isinstance(self.result, BoughError):
            raise self.result
        return self.result


@dataclass
class LateTicket:
    """A copy beside the steps, which happens as late as it can: when its end is seen, or when another copy begins."""

    act: Callable[[], object] | None
    before: LateTicket | None  # copies happen in order
    looks: int = 8

    def ready(self) -> bool:
        self.looks -= 1
        if self.looks <= 0:
            self.wait()
        return self.act is None

    def wait(self) -> CommandResult:
        if self.before is not None:
            self.before.wait()
        if self.act is not None:
            self.act()
        self.act = self.before = None
        return CommandResult()


class FakeExecutor:
    """Its weights are a text, of which the length counts; the checkpoint `missing` is none."""

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
        drafts: int = 0,
        groups: Sequence[tuple[KVGroup, int]] = (),
    ) -> None:
        all_pages = (pages, *(of_group for _, of_group in groups))
        self._limits = Limits(
            *(rows, page_size, all_pages, context_length, VOCAB, chunk_tokens, "fake", even_tokens, late_plans, drafts),
            adaptive_drafts=False,  # there is no telling what they are worth
            groups=(FULL_ATTENTION, *(group for group, _ in groups)),
            page_bytes=(4 * page_size, *(4 * page_size if group.window else 8 for group, _ in groups)),
            shares_reads=True,
        )
        self.windows = [WindowGroup(i, *group, page_size) for i, group in enumerate(groups, 1) if group[0].window]
        self.states = [StateGroup(i) for i, (group, _) in enumerate(groups, 1) if group.kind == "state"]
        self.weights = self.files = ""  # and those that the files have
        self.placed: dict[int, str] = {}  # adapters by slot
        self.reading: FakeTicket | None = None  # what adapters are read by; None: at once
        self.asleep: set[MemoryTag] = set()
        self.command_looks = 0  # how often a ticket must be looked at
        self.tickets: list[FakeTicket] = []
        self.order: list[int | str] = []  # steps and commands
        self.late: LateTicket | None = None  # the last copy beside the steps
        self._draw = random.Random(5)
        self.counts: list[int] = []  # tokens that decodes gave, one after the other
        self.row_counts: dict[int, int] = {}  # what each row got last
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
        self.pauses: list[int] = []  # under load: after how many plans

    def limits(self) -> Limits:
        return self._limits

    def idle(self, busy: bool = False) -> bool:
        if busy:
            self.pauses.append(len(self.plans))
            return False
        if not self.postponed:
            return False
        self.postponed -= 1
        return True

    def close(self) -> None:
        pass

    def control(self, command: Command) -> FakeTicket | LateTicket:
        self.order.append(type(command).__name__)
        if isinstance(command, CopyPagesOut) and command.beside:
            self.late = LateTicket(lambda: self._obey(command), self.late)
            return self.late
        if self.late is not None:
            self.late.wait()
        try:
            result: CommandResult | BoughError = self._obey(command)
        except BoughError as error:
            result = error
        self.tickets.append(FakeTicket(result, self.command_looks))
        return self.tickets[-1]

    def _obey(self, command: Command) -> CommandResult:
        match command:
            case SwapWeights():
                if command.model_path == "missing":
                    raise ModelError("There is no such model.")
                self.weights = self.files = command.model_path
            case TakeTensors():
                (self.weights,) = command.files
            case Sleep():
                self.asleep |= {*command.tags}
                if "kv_cache" in command.tags:
                    self.slots.fill(-1)
            case Wake():
                lost = "weights" in self.asleep & {*command.tags} and self.weights != self.files
                self.asleep -= {*command.tags}
                self.weights = self.files if lost else self.weights
                return CommandResult("done", "asleep" if self.asleep else "", lost=lost)
            case CopyPagesOut():
                slots = slice(None) if command.slots is None else command.slots
                command.buffer[slots] = self._content(command.group, command.pages)
            case CopyPagesIn():
                slots = slice(None) if command.slots is None else command.slots
                self._fill(command.group, command.pages, command.buffer[slots])
            case ReadAdapter():
                return CommandResult(done=None if self.reading is None else self.reading.ready)
            case LoadAdapter():
                if command.path == "missing":
                    raise ModelError("There is no such adapter.")
                return CommandResult(content=str(command.path))
            case PlaceAdapter():
                self.placed[command.slot] = command.name
            case ProfileStart() | ProfileStop():
                pass
        return CommandResult("done", "asleep" if self.asleep else "")

    def _by_page(self, group: int) -> np.ndarray | StateGroup:
        """The tokens of a group of attention by page, or a state group."""
        if group == 0:
            return self.slots.reshape(-1, self.page_size)
        return next(
            found if isinstance(found, StateGroup) else found.slots.reshape(-1, self.page_size)
            for found in (*self.windows, *self.states)
            if found.index == group
        )

    def _content(self, group: int, pages: np.ndarray) -> np.ndarray:
        held = self._by_page(group)
        if isinstance(held, StateGroup):
            return np.array([held.content[page] for page in pages.tolist()], dtype=np.uint32).view(np.uint8)
        return held[pages].view(np.uint8)

    def _fill(self, group: int, pages: np.ndarray, content: np.ndarray) -> None:
        held, content = self._by_page(group), np.ascontiguousarray(content)
        if not isinstance(held, StateGroup):
            held[pages] = content.view(np.int32)
            return
        for page, (length, checksum) in zip(pages.tolist(), content.view(np.uint32).tolist(), strict=True):
            held.content[page] = (length, checksum)

    def launch(self, plan: BatchPlan) -> Done:
        assert self.unmasked is None, "masks come before the next launch"
        assert not self.asleep and not any(ticket.looks for ticket in self.tickets), "a command was overtaken"
        self.order.append(plan.step)
        assert len({setup.row for setup in plan.setups}) == len(plan.setups)
        self.plans.append(plan)
        for setup in plan.setups:
            self.generated[setup.row], self.prompt_lens[setup.row] = setup.generated, setup.prompt_len
            self.scored[setup.row] = setup.logprobs is not None
            self.tables[setup.row] = setup.pages[0].tolist()
            self.lengths[setup.row] = setup.length
            for group in (*self.windows, *self.states):
                group.set_up(setup)
        for edit in plan.edits:
            assert edit.group == 0
            table = self.tables[edit.row]
            assert edit.first + len(edit.pages) <= len(table), "an edit reaches past the row's table"
            for i, page in enumerate(edit.pages.tolist()):
                old = self._page(table[edit.first + i])
                assert (old == self._page(page)).all() or edit.first + i >= self.lengths[edit.row] // self.page_size
                table[edit.first + i] = page
        plan = plan.aligned(np.array([self.row_counts.get(row, 1) for row in plan.rows.tolist()], dtype=np.int32))
        self._check_common(plan)
        self._append_pages(plan)
        self._store(plan)
        if plan.masked is None:
            return Done(self._read(plan, {}))
        assert plan.masked.any() and not (plan.masked & ~plan.sample).any()
        self.unmasked = self._with_drafts(plan), Done(None)
        return self.unmasked[1]

    def _with_drafts(self, plan: BatchPlan) -> BatchPlan:
        given, tokens, offset = plan.given.copy(), [], 0
        for index, row in enumerate(plan.rows.tolist()):
            own = plan.tokens[offset : offset + given[index]]
            offset += len(own)
            if len(own) + 1 < plan.query_lens[index]:
                given[index] = plan.query_lens[index] - 1
                own = self._sequence(row)[-given[index] :]
            tokens.append(own)
        return replace(plan, given=given, tokens=np.concatenate(tokens).astype(np.int32))

    def drafted(self, step: int) -> BatchPlan:
        assert self.unmasked is not None and self.unmasked[0].step == step
        return self.unmasked[0]

    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        assert self.unmasked is not None
        (plan, done), self.unmasked = self.unmasked, None
        assert plan.step == step and plan.masked is not None
        positions = 1 + np.where(plan.given < plan.query_lens, plan.given, 0)[plan.masked]
        assert masks.words.shape == (int(positions.sum()), mask_words(VOCAB))
        lines = np.split(masks.words, positions.cumsum()[:-1])
        done.result = self._read(plan, dict(zip(np.flatnonzero(plan.masked).tolist(), lines, strict=True)))

    def _page(self, page: int) -> np.ndarray:
        return self.slots[page * self.page_size : (page + 1) * self.page_size]

    def _check_common(self, plan: BatchPlan) -> None:
        if plan.common is None:
            return
        rows = plan.rows.tolist()
        assert len(plan.common) == len(rows) and plan.common[0] == 0 and plan.common.any()
        for row, before, tokens in zip(rows[1:], rows, plan.common[1:].tolist(), strict=False):
            pages = tokens // self.page_size
            assert tokens == pages * self.page_size <= min(self.lengths[row], self.lengths[before])
            assert self.tables[row][:pages] == self.tables[before][:pages], "they do not share so much"

    def _append_pages(self, plan: BatchPlan) -> None:
        offset = 0
        for row, count in zip(plan.rows.tolist(), plan.new_page_counts[0].tolist(), strict=True):
            self.tables[row] += plan.new_pages[0][offset : offset + count].tolist()
            offset += count
        assert offset == len(plan.new_pages[0])
        for window in self.windows:
            window.append(plan)

    def _store(self, plan: BatchPlan) -> None:
        """Every row writes before any row reads, as in each layer of a real model."""
        offset = 0
        written: set[int] = set()
        for state in self.states:
            state.check(plan.rows.tolist(), self._sequence)
        for row, query, given in zip(plan.rows.tolist(), plan.query_lens.tolist(), plan.given.tolist(), strict=True):
            tokens = plan.tokens[offset : offset + given].tolist()
            offset += given
            if given < query:
                tokens = [self.last_token[row], *tokens]
                tokens += self._guesses(row, tokens, query - len(tokens))
            assert len(tokens) == query
            for token in tokens:
                position = self.lengths[row]
                slot = self.tables[row][position // self.page_size] * self.page_size + position % self.page_size
                assert slot >= self.page_size, "page 0 belongs to nobody"
                assert slot not in written, "two rows of one plan write to one place"
                written.add(slot)
                self.slots[slot] = token
                for window in self.windows:
                    window.store(row, position, token)
                self.lengths[row] += 1
            self.computed_tokens += query
        assert offset == len(plan.tokens)
        if not len(plan.tokens):
            self._check_apart(plan, written)

    def _check_apart(self, plan: BatchPlan, written: set[int]) -> None:
        """In a plan of decodes alone, no row reads what another one writes: executors may attend as they store."""
        for row in plan.rows.tolist():
            read = set(self._places(row).tolist())
            own = int(plan.query_lens[plan.rows == row][0])
            assert len(read & written) == own, "a decode reads what another one of its plan writes"

    def _guesses(self, row: int, tokens: list[int], count: int) -> list[int]:
        """What the device itself thinks will follow: mostly right."""
        sequence = [*self._sequence(row).tolist(), *tokens]
        for _ in range(count):
            true = next_token(np.array(sequence, dtype=np.int32))
            sequence.append(true if self._draw.random() < 0.7 else self._draw.randrange(VOCAB))
        return sequence[len(sequence) - count :]

    def _places(self, row: int) -> np.ndarray:
        positions = np.arange(self.lengths[row])
        table = np.array(self.tables[row])
        return table[positions // self.page_size] * self.page_size + positions % self.page_size

    def _sequence(self, row: int) -> np.ndarray:
        return self.slots[self._places(row)]

    def _read(self, plan: BatchPlan, masks: dict[int, np.ndarray]) -> StepResult:
        runs, bad = [], []
        output: dict[int, PositionLogprobs] = {}
        inputs = {w.index: self._input_logprobs(plan, w) for w in plan.input_logprobs}
        for index, row in enumerate(plan.rows.tolist()):
            sequence = self._sequence(row)
            assert (sequence >= 0).all(), "a row reads a place that nobody wrote"
            for window in self.windows:
                window.check(row, sequence, int(plan.query_lens[index]))
            if plan.sample[index]:
                decode = plan.given[index] < plan.query_lens[index]
                drafts = int(plan.query_lens[index]) - 1 if decode else 0
                assert len(sequence) - drafts == self.prompt_lens[row] + self.generated[row]
                run = self._verified(row, sequence, drafts, masks.get(index, ()))
                if decode and (self._limits.drafts or drafts):  # there is no need to take all that holds
                    run = run[: self._draw.randint(0, len(run))] if self._draw.random() < 0.2 else run
                    self.counts.append(len(run))
                self.row_counts[row] = len(run)
                self.generated[row] += len(run)
                self.lengths[row] -= drafts + 1 - len(run) if decode else 0
                self.last_token[row] = max(run[-1], 0) if run else self.last_token[row]
                runs.append([max(token, 0) for token in run])
                bad.append(row in self.poisoned_rows or -1 in run)
                if self.scored[row]:
                    output[index] = _scores(np.array(runs[-1], dtype=np.int32))
        for state in self.states:
            state.advance(plan, self._sequence)
        tokens = np.zeros((len(runs), max([1, *map(len, runs)])), dtype=np.int32)
        for line, run in zip(tokens, runs, strict=True):
            line[: len(run)] = run
        counts = np.array([len(run) for run in runs], dtype=np.int32)
        return StepResult(plan.step, tokens, counts, np.array(bad, dtype=np.bool_), output, inputs)

    def _verified(self, row: int, sequence: np.ndarray, drafts: int, masks: Sequence[np.ndarray]) -> list[int]:
        """The drafts at the end of the sequence as far as they hold, and one token more."""
        run: list[int] = []
        for end in range(len(sequence) - drafts, len(sequence) + 1):
            mask = masks[len(run)] if len(run) < len(masks) else None
            run.append(self.next_token(row, sequence[:end], mask))
            if end == len(sequence) or run[-1] != sequence[end]:
                break
        return run

    def next_token(self, row: int, sequence: np.ndarray, allowed: np.ndarray | None = None) -> int:
        return next_token(sequence, allowed, self.weights)

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


class PipelineExecutor(FakeExecutor):
    """Stages that each take one tick for a step. A step enters when it is launched: no earlier than the host has seen
    the results that it waited for."""

    def __init__(self, stages: int, **limits: Any) -> None:
        super().__init__(**limits)
        self._limits = replace(self._limits, stages=stages)
        self.now = 0  # what the host has seen
        self.spans: list[list[int]] = []  # of each step: when it is in which stage
        self.in_flight: list[BatchPlan] = []
        self.most_in_flight = 0

    def launch(self, plan: BatchPlan) -> PipelineStep:  # type: ignore[override]
        decodes = plan.rows[plan.given < plan.query_lens].tolist()
        assert plan.last_tokens is not None
        assert plan.last_tokens.tolist() == [self.last_token[row] for row in decodes]
        waiting = {row for other in self.in_flight for row in other.rows[other.sample].tolist()}
        again = waiting & {*plan.rows.tolist()} - {setup.row for setup in plan.setups}
        assert not again, "a row runs again before its token has come out of the last stage"
        done, free = super().launch(plan), self.spans[-1] if self.spans else [-1] * self._limits.stages
        times, last = [], self.now - 1
        for busy in free:
            last = max(last, busy) + 1
            times.append(last)
        self.spans.append(times)
        self.in_flight.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        return PipelineStep(done, self, plan, last + 1)

    def idle_ticks(self, stage: int) -> int:
        """In which it had nothing to do, between its first step and its last."""
        busy = [times[stage] for times in self.spans]
        return busy[-1] - busy[0] + 1 - len(busy)


@dataclass(frozen=True)
class PipelineStep:
    done: Done
    executor: PipelineExecutor
    plan: BatchPlan
    end: int

    def ready(self) -> bool:
        return self.done.ready()

    def wait(self) -> StepResult:
        self.executor.now = max(self.executor.now, self.end)
        assert self.executor.in_flight.pop(0) is self.plan, "results come in order"
        return self.done.wait()


class GuessingProposer:
    """Drafts of the host, right and wrong ones, also behind tokens that are still in flight."""

    def __init__(self, most: int) -> None:
        self.most, self.adaptive = most, False
        self._draw = random.Random(6)

    def propose(self, known: np.ndarray, namespace: str, count: int) -> tuple[np.ndarray, int]:
        sequence = known.tolist()
        for _ in range(count):
            sequence.append(next_token(np.array(sequence, dtype=np.int32)))
        drafts = [token if self._draw.random() < 0.8 else self._draw.randrange(VOCAB) for token in sequence]
        return np.array(drafts[len(known) :][: self._draw.randint(0, count)], dtype=np.int32), 0

    def learn(self, tokens: np.ndarray, namespace: str) -> None:
        return
