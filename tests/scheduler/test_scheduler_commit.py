"""Results of steps as tables: tokens in; recorded tokens, endings and messages out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bough.core.finish import FinishAbort, FinishLength, FinishReason, FinishStop
from bough.core.plan import Limits, LogprobSpec, PositionLogprobs, StepResult
from bough.core.settings import MemorySettings
from bough.observability.step_trace import Timeline
from bough.scheduler.assembly import Assembly, Chunk, Decodes, PlannedStep
from bough.scheduler.commit import BAD_LOGITS, Committer
from bough.scheduler.drafting import Drafts
from bough.scheduler.grammar_steps import GrammarSteps
from bough.scheduler.prefix_cache import PrefixCache
from bough.scheduler.request import Request
from bough.scheduler.rows import Phase, RowTable
from bough.scheduler.running_batch import RunningBatch
from tests.fakes.boxes import FakeOutbox, waiting_request
from tests.fakes.executor import FakeExecutor

EOS = 50
PROMPT = [1, 2, 3]


class Desk:
    """A committer with real rows and pages, and steps made by hand."""

    def __init__(self) -> None:
        self.table = RowTable(4, 32, 1)
        self.cache = PrefixCache(Limits(4, 1, (64,), 32, 100, 16, "test"), MemorySettings())
        self.batch = RunningBatch(self.table, self.cache)
        self.out = FakeOutbox()
        self.forgotten: list[int] = []
        grammars = GrammarSteps(self.batch, FakeExecutor(), None, Timeline())
        self.facts, forget = {"weight_version": "step-1"}, lambda r: self.forgotten.append(r.handle)
        self.committer = Committer(self.batch, grammars, self.out, (EOS,), forget, facts=self.facts)
        self._assembly = Assembly(self.table)

    def seat(self, handle: int, **fields: Any) -> Request:
        request = waiting_request(handle, PROMPT, **fields)
        self.out.opened.add(handle)
        self.batch.admit(request, self.cache.match_and_lock(request.tokens[:0], ""))
        return request

    def prefill(self, *requests: Request, count: int = len(PROMPT)) -> PlannedStep:
        chunks = []
        for request in requests:
            first = int(self.table.length[request.row])
            final = first + count == len(PROMPT)
            self.table.sampled[request.row] += final
            chunks.append(Chunk(request, first, count, self.batch.grow(request.row, count), final))
        none = np.zeros(0, dtype=np.int32)
        decodes = Decodes(np.zeros(0, dtype=np.intp), Drafts(none, none, none), none, none)
        return self._assembly.assemble([], (), decodes, chunks)

    def decode(self, *requests: Request, width: int = 1) -> PlannedStep:
        rows = np.array([r.row for r in requests], dtype=np.intp)
        widths = np.full(len(rows), width, dtype=np.int32)
        drafts = Drafts(widths, np.zeros_like(widths), np.zeros(0, dtype=np.int32))
        self.table.count_samples(rows, widths)
        return self._assembly.assemble([], (), Decodes(rows, drafts, *self.batch.grow_decodes(rows, widths)), [])

    def commit(self, step: PlannedStep, *tokens: int, bad: tuple[int, ...] = (), **logprobs: Any) -> None:
        self.commit_several(step, *([token] for token in tokens), bad=bad, **logprobs)

    def commit_several(self, step: PlannedStep, *runs: list[int], bad: tuple[int, ...] = (), **logprobs: Any) -> None:
        """So many tokens for each row."""
        tokens = np.zeros((len(runs), max([1, *map(len, runs)])), dtype=np.int32)
        for line, run in zip(tokens, runs, strict=True):
            line[: len(run)] = run
        failed = np.array([i in bad for i in range(len(runs))], dtype=np.bool_)
        found = {"output_logprobs": {}, "input_logprobs": {}} | logprobs
        counts = np.array([len(run) for run in runs], dtype=np.int32)
        self.committer.commit(step, StepResult(step.plan.step, tokens, counts, failed, **found))


def run_of(*tokens: int) -> PositionLogprobs:
    values = np.array(tokens, dtype=np.int32)
    empty = np.zeros((len(tokens), 0), dtype=np.float32)
    return PositionLogprobs(values, -values.astype(np.float32), empty, empty.astype(np.int32), empty)


@pytest.mark.parametrize(
    ("sampling", "outputs", "bad", "expected"),
    [
        ({"max_new_tokens": 3}, [7, 8], False, None),
        ({"max_new_tokens": 2}, [7, 8], False, FinishLength(2)),
        ({"max_new_tokens": 9}, [7, EOS], False, FinishStop(EOS)),
        ({"max_new_tokens": 2}, [7, EOS], False, FinishStop(EOS)),  # a stop says more than a length
        ({"max_new_tokens": 9, "ignore_eos": True}, [7, EOS], False, None),
        ({"max_new_tokens": 9, "stop_token_ids": (8,)}, [7, 8], False, FinishStop(8)),
        ({"max_new_tokens": 9, "stop_token_ids": (8,), "ignore_eos": True}, [EOS, 8], False, FinishStop(8)),
        ({"max_new_tokens": 9, "stop_token_ids": (8,)}, [7, 9], False, None),
        ({"max_new_tokens": 2}, [7, EOS], True, BAD_LOGITS),
    ],
)
def test_why_a_request_ends(
    sampling: dict[str, Any], outputs: list[int], bad: bool, expected: FinishReason | None
) -> None:
    desk = Desk()
    request = desk.seat(1, **sampling)
    desk.commit(desk.prefill(request), outputs[0])
    desk.commit(desk.decode(request), outputs[1], bad=(0,) if bad else ())
    assert desk.out.outputs[1] == outputs
    assert desk.out.ended.get(1) == expected
    assert desk.forgotten == ([] if expected is None else [1])
    assert desk.table.running == (expected is None)
    known = request.tokens if expected is not None else desk.table.tokens[request.row, : len(PROMPT) + 2]
    assert known.tolist() == PROMPT + outputs


def test_one_of_many_ends_alone() -> None:
    desk = Desk()
    requests = [desk.seat(handle, max_new_tokens=9) for handle in range(3)]
    desk.commit(desk.prefill(*requests), 7, EOS, 8)
    assert desk.out.ended == {1: FinishStop(EOS)} and desk.table.running == 2
    assert desk.committer.generated_tokens == 3 and desk.committer.prompt_tokens == 9


def test_a_prompt_starts_when_its_last_chunk_is_done() -> None:
    desk = Desk()
    request = desk.seat(1, max_new_tokens=2, queue_time_s=1.5)
    desk.commit(desk.prefill(request, count=2))
    assert desk.out.started == {} and desk.out.outputs == {}
    desk.commit(desk.prefill(request, count=1), 7)
    assert desk.out.started[1].queue_time_s == 1.5 and desk.out.started[1].cached_tokens == 0


def test_no_new_tokens_end_with_the_prompt() -> None:
    desk = Desk()
    desk.commit(desk.prefill(desk.seat(1, max_new_tokens=0)))
    assert desk.out.ended == {1: FinishLength(0)} and 1 in desk.out.started


@pytest.mark.parametrize("found", ["vectors", "input_logprobs"])
def test_no_new_tokens_end_with_an_error_where_a_vector_or_a_logprob_is_no_number(found: str) -> None:
    """And nobody reads the pages of such a prompt."""
    desk = Desk()
    request, other = desk.seat(1, max_new_tokens=0), desk.seat(2, max_new_tokens=0)
    scores = run_of(2, 3)
    scores.logprobs[1] = np.nan
    broken = {"vectors": np.array([1.0, np.inf], dtype=np.float32), "input_logprobs": scores}[found]
    left = list[tuple[int, bool]]()
    leave = desk.batch.leave
    desk.batch.leave = lambda request, *, spoilt: (left.append((request.handle, spoilt)), leave(request))  # type: ignore
    desk.commit(desk.prefill(request, other), **{found: {0: broken}})
    assert desk.out.ended == {1: BAD_LOGITS, 2: FinishLength(0)} and left == [(1, True), (2, False)]


def test_the_result_of_a_row_that_has_moved_on_is_dropped() -> None:
    desk = Desk()
    first = desk.seat(1, max_new_tokens=9)
    desk.commit(desk.prefill(first), 7)
    late = desk.decode(first)
    desk.committer.end(first, FinishAbort("enough"))
    second = desk.seat(2, max_new_tokens=9)
    assert second.row == late.plan.rows[0], "the row has a new owner"
    desk.commit(late, 8)
    assert desk.out.outputs == {1: [7]} and desk.table.known[second.row] == len(PROMPT)


def test_prompt_logprobs_of_all_chunks_are_joined() -> None:
    desk = Desk()
    request = desk.seat(1, max_new_tokens=1, logprob_next=0)
    desk.commit(desk.prefill(request, count=2), input_logprobs={0: run_of(2, 3)})
    desk.commit(desk.prefill(request, count=1), 7, input_logprobs={0: run_of(4)})
    joined = desk.out.started[1].input_logprobs
    assert joined is not None and np.frombuffer(joined.tokens, np.int32).tolist() == [2, 3, 4]


@pytest.mark.parametrize("seated", [True, False])
def test_an_ending_outside_of_a_step_frees_the_row_and_is_told_once(seated: bool) -> None:
    desk = Desk()
    request = desk.seat(1) if seated else waiting_request(1)
    desk.out.opened.add(1)
    desk.committer.end(request, FinishAbort("enough"))
    assert desk.out.ended == {1: FinishAbort("enough")} and desk.forgotten == [1] and desk.table.running == 0


def test_what_never_ran_ends_with_the_weights_of_now() -> None:
    desk = Desk()
    ran = desk.seat(1)
    desk.commit(desk.prefill(ran), 7)
    desk.facts["weight_version"] = "step-2"
    desk.out.opened.add(2)
    for request in (ran, waiting_request(2)):
        desk.committer.end(request, FinishAbort("enough"))
    desk.committer.refuse(3, FinishAbort("enough"))
    assert desk.out.versions == {1: "step-1", 2: "step-2", 3: "step-2"}


def test_a_dropped_request_ends_without_a_word() -> None:
    desk = Desk()
    desk.committer.drop(desk.seat(1))
    assert desk.out.ended == {} and desk.forgotten == [1] and desk.cache.available == 64


# Several tokens a row and step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "run", "kept", "expected"),
    [
        ({"max_new_tokens": 9}, [7, 8, 9], [7, 8, 9], None),
        ({"max_new_tokens": 9}, [], [], None),
        ({"max_new_tokens": 4}, [7, 8, 9], [7, 8, 9], FinishLength(4)),
        ({"max_new_tokens": 9}, [7, EOS, 9], [7, EOS], FinishStop(EOS)),
        ({"max_new_tokens": 9, "ignore_eos": True}, [7, EOS, 9], [7, EOS, 9], None),
        ({"max_new_tokens": 9, "stop_token_ids": (7, 9)}, [6, 9, 7], [6, 9], FinishStop(9)),
    ],
)
def test_a_row_gets_all_tokens_up_to_its_end(
    sampling: dict[str, Any], run: list[int], kept: list[int], expected: FinishReason | None
) -> None:
    desk = Desk()
    request, other = desk.seat(1, **sampling), desk.seat(2, max_new_tokens=9)
    desk.commit(desk.prefill(request, other), 1, 2)
    desk.commit_several(desk.decode(request, other, width=3), run, [3])
    assert desk.out.outputs[1] == [1, *kept] and desk.out.ended.get(1) == expected
    assert desk.out.outputs[2] == [2, 3] and 2 not in desk.out.ended
    table = desk.table
    if expected is None:
        assert table.length[request.row] == table.known[request.row] - 1 == len(PROMPT) + len(run)
        assert table.sampled[request.row] == 1 + len(run)


def test_a_row_that_may_be_complete_goes_on_when_it_is_not() -> None:
    desk = Desk()
    request = desk.seat(1, max_new_tokens=4)
    desk.commit(desk.prefill(request), 1)
    table, row = desk.table, request.row
    step = desk.decode(request, width=3)
    assert table.phase[row] == Phase.DRAINING
    desk.commit_several(step, [7])
    assert table.phase[row] == Phase.DECODE and int(table.sampled[row]) == 2
    assert int(table.page_count[row]) == len(PROMPT) + 3  # what was taken for drafts serves the next tokens
    assert desk.batch.pages_for_decodes(np.array([row]), 2) == 0
    desk.commit_several(desk.decode(request, width=2), [8, 9])
    assert desk.out.ended == {1: FinishLength(4)} and desk.out.outputs[1] == [1, 7, 8, 9]


def test_logprobs_are_cut_with_the_tokens() -> None:
    desk = Desk()
    request = desk.seat(1, max_new_tokens=9, logprobs=LogprobSpec())
    desk.commit(desk.prefill(request), 1, output_logprobs={0: run_of(1)})
    desk.commit_several(desk.decode(request, width=3), [7, EOS, 9], output_logprobs={0: run_of(7, EOS, 9)})
    assert desk.out.scored[1] == [1, 7, EOS] and desk.out.scores[1] == [-1, -7, -EOS]
