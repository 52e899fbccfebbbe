"""Constrained requests in the loop: the gate, how grammars end, and what a jump saves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.messages.requests import Abort, LogprobRequest
from bough.scheduler import jump_forward
from bough.scheduler.constraint import DEAD_END
from tests.fakes.executor import FakeExecutor
from tests.fakes.executor import oracle as free_oracle
from tests.fakes.grammars import EOS, PIECES, FakeGrammars, Places, grammar, oracle, spell
from tests.fakes.scheduler_bench import Bench

CHOICE = [1, 2, 3, 40]
FORCED: Places = [CHOICE, [9], [8], [7], [6], [9], [8], CHOICE]
FREE: Places = [CHOICE] * 6


def bench(looks: int = 0, **settings: object) -> Bench:
    return Bench(eos_ids=(EOS,), grammars=FakeGrammars(looks), **settings)


def text_of(tokens: list[int]) -> bytes:
    return b"".join(PIECES[token] for token in tokens)


# The gate -------------------------------------------------------------------------------------------------------------


def test_others_pass_a_request_whose_grammar_is_being_compiled() -> None:
    b = bench(looks=6)
    b.ask(0, [1, 2], max_new_tokens=20, regex=grammar(FREE))
    b.ask(1, [1, 2], max_new_tokens=2)
    b.turn(5)
    assert isinstance(b.out.ended[1], FinishLength) and not b.out.outputs[0]
    b.run()
    assert b.out.outputs[0] == oracle([1, 2], FREE, 20)


def test_a_refused_grammar_ends_its_own_request_alone() -> None:
    b = bench(looks=3)
    b.ask(0, [1], max_new_tokens=4, regex='"hopeless"')
    b.ask(1, [1], max_new_tokens=4, regex=grammar(FREE))
    b.run()
    refused = b.out.ended[0]
    assert isinstance(refused, FinishAbort) and refused.status_code == 400 and refused.field == "regex"
    assert b.out.outputs[1] == oracle([1], FREE, 4)


def test_a_request_may_be_aborted_at_the_gate() -> None:
    b = bench(looks=1000)
    b.ask(0, [1], regex=grammar(FREE))
    b.turn(2)
    b.submit(Abort(0))
    b.run()
    reason = b.out.ended[0]
    assert isinstance(reason, FinishAbort) and reason.status_code == 499
    grammars = b.scheduler._gate._grammars
    assert isinstance(grammars, FakeGrammars) and grammars.tickets[0].cancelled


def test_waiting_at_the_gate_counts_as_waiting() -> None:
    b = bench(looks=1000, waiting_timeout_s=5.0, max_queued_requests=1)
    b.ask(0, [1], regex=grammar(FREE))
    b.turn()
    b.ask(1, [1])
    b.turn()
    assert isinstance(b.out.ended[1], FinishAbort) and b.out.ended[1].status_code == 429
    b.now = 6.0
    b.run()
    reason = b.out.ended[0]
    assert isinstance(reason, FinishAbort) and reason.err_type == "TimeoutError"


def test_the_loop_sleeps_between_looks_at_the_gate() -> None:
    b = bench(looks=3)
    b.ask(0, [1], max_new_tokens=2, regex=grammar(FREE))
    b.run()
    assert 0 < len([wait for wait in b.inbox.waits if wait]) <= 4


def test_an_engine_without_a_tokenizer_refuses_grammars() -> None:
    b = Bench()
    b.ask(0, [1], regex="a")
    b.run()
    reason = b.out.ended[0]
    assert isinstance(reason, FinishAbort) and reason.field == "regex" and "tokenizer" in reason.message


def test_what_can_never_be_compiled_is_refused_at_once() -> None:
    b = bench()
    b.ask(0, [1], json_schema="{no json")
    b.run()
    reason = b.out.ended[0]
    assert isinstance(reason, FinishAbort) and reason.field == "json_schema"


def test_warnings_go_out_with_the_first_token() -> None:
    b = bench()
    b.ask(0, [1], max_new_tokens=2, json_schema='{"const": [[9], [8]]}', grammar_strict=False)
    b.ask(1, [1], max_new_tokens=2, json_schema='{"const": [[9], [8]]}')
    b.run()
    assert b.out.started[0].warnings == ("not enforced",) and b.out.started[1].warnings == ()


# Resumed requests -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [FREE, FORCED])
def test_a_resumed_request_goes_on_where_its_grammar_was(places: Places) -> None:
    whole = bench()
    whole.ask(0, [1, 2], max_new_tokens=20, regex=grammar(places))
    whole.run()
    for cut in range(1, len(whole.out.outputs[0])):
        head, tail = whole.out.outputs[0][:cut], whole.out.outputs[0][cut:]
        b = bench()
        b.ask(0, [1, 2], max_new_tokens=20, regex=grammar(places), output_ids=np.array(head, np.int32).tobytes())
        b.run()
        assert b.out.outputs[0] == tail and b.out.ended[0] == whole.out.ended[0]


def test_output_that_strays_from_the_grammar_is_refused() -> None:
    b = bench()
    b.ask(0, [1, 2], regex=grammar(FREE), output_ids=np.array([9], np.int32).tobytes())
    b.run()
    refused = b.out.ended[0]
    assert isinstance(refused, FinishAbort) and refused.field == "resume.output_ids" and refused.status_code == 400


# How a grammar ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"ignore_eos": True}, {"min_new_tokens": 20}])
def test_a_whole_text_ends_even_where_the_end_is_unwanted(options: dict[str, object]) -> None:
    """Nothing could follow it."""
    b = bench()
    b.ask(0, [1, 2], max_new_tokens=20, regex=grammar(FREE), **options)
    b.run()
    assert b.out.ended[0] == FinishStop(EOS) and b.out.outputs[0] == oracle([1, 2], FREE, 20)


def test_a_cut_answer_says_length() -> None:
    b = bench()
    b.ask(0, [1, 2], max_new_tokens=3, regex=grammar(FREE))
    b.run()
    assert b.out.ended[0] == FinishLength(3)


@pytest.mark.parametrize(("least", "place", "expected"), [(0, [8], [9, 8]), (3, [7, 8], [9, 7, 8]), (3, [8], [9, 8])])
def test_a_stop_token_of_the_request_ends_it(least: int, place: list[int], expected: list[int]) -> None:
    """Before `min_new_tokens` only where nothing else could come."""
    b = bench(disable_jump_forward=True)
    places: Places = [[9], place, [8], CHOICE, CHOICE]
    b.ask(0, [1], max_new_tokens=20, regex=grammar(places), stop_token_ids=(8,), min_new_tokens=least)
    b.run()
    assert b.out.outputs[0] == expected and b.out.ended[0] == FinishStop(8)


def test_a_stop_token_among_the_forced_ones_ends_the_request_there() -> None:
    b = bench()
    b.ask(0, [1], max_new_tokens=20, regex=grammar([[9], [8], [7], [6], [5], CHOICE]), stop_token_ids=(6,))
    b.run()
    assert b.out.outputs[0] == [9, 8, 7, 6] and b.out.ended[0] == FinishStop(6)


def test_a_dead_end_fails_its_request_alone() -> None:
    b = bench()
    b.ask(0, [1], max_new_tokens=9, regex=grammar([CHOICE, [], [9]]))
    b.ask(1, [1], max_new_tokens=9, regex=grammar(FREE))
    b.run()
    assert b.out.ended[0] == DEAD_END
    assert b.out.outputs[1] == oracle([1], FREE, 9)


# Jumps ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("logprobs", [None, LogprobRequest()])
def test_forced_tokens_cost_one_step_together(overlap: bool, logprobs: LogprobRequest | None) -> None:
    steps = []
    for off in (False, True):
        b = bench(disable_jump_forward=off, disable_overlap_schedule=not overlap)
        b.ask(0, [1, 2], max_new_tokens=30, regex=grammar(FORCED), logprobs=logprobs)
        b.run()
        assert text_of(b.out.outputs[0])[1:7] == bytes([9, 8, 7, 6, 9, 8])
        assert b.out.outputs[0] == oracle([1, 2], FORCED, 30, jumps=not off, logprobs=logprobs is not None)
        assert b.out.scored[0] == (b.out.outputs[0] if logprobs else [])
        steps.append(len(b.executor.plans))
    assert steps[0] <= steps[1] - 4


@pytest.mark.parametrize("prompt", [[1], [2], [3], [4]])
def test_a_forced_end_is_spelt_as_the_tokenizer_would(prompt: list[int]) -> None:
    """Nothing can merge with its last bytes, so they are not left to the model."""
    b = bench()
    b.ask(0, prompt, max_new_tokens=20, regex=grammar([[1, 2, 9], [3], [7], [4], [2]]))
    b.run()
    assert b.out.outputs[0] == [*spell(text_of(b.out.outputs[0]), whole=True), EOS]
    assert b.out.ended[0] == FinishStop(EOS) and len(b.executor.plans) <= 2


@pytest.mark.parametrize("logprobs", [None, LogprobRequest()])
def test_long_forced_text_is_laid_down_in_parts(
    logprobs: LogprobRequest | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To spell all of it with every token would hold up all other requests."""
    monkeypatch.setattr(jump_forward, "LONGEST", 6)
    monkeypatch.setattr(jump_forward, "MOST", 12)
    grammars, asked = FakeGrammars(), list[tuple[int, bool]]()

    def noted(last: int | None, forced: bytes, *, whole: bool = False) -> Sequence[int]:
        asked.append((len(forced), whole))
        return spell((b"" if last is None else PIECES[last]) + forced, whole=whole)

    monkeypatch.setattr(grammars, "spell", noted)
    b = Bench(eos_ids=(EOS,), grammars=grammars)
    places = [[1, 2], *([place] for place in (3, 4, 5, 6, 7) * 8), [1, 2]]
    b.ask(0, [1], max_new_tokens=80, regex=grammar(places), logprobs=logprobs)
    b.run()
    assert b.out.ended[0] == FinishStop(EOS) and text_of(b.out.outputs[0])[1:-1] == bytes((3, 4, 5, 6, 7) * 8)
    assert (
        max(length for length, _ in asked) == 12 and max((length for length, whole in asked if whole), default=0) <= 6
    )
    assert len(b.executor.plans) < 30


@pytest.mark.parametrize("room", [2, 3, 4])
def test_a_forced_end_that_has_no_room_says_length(room: int) -> None:
    b = bench()
    b.ask(0, [1], max_new_tokens=room, regex=grammar([[40, 41], [9], [8], [7]]))
    b.run()
    assert b.out.ended[0] == FinishLength(room) and len(b.out.outputs[0]) == room


@pytest.mark.parametrize("first", range(10, 20))
def test_a_token_that_a_jump_replaced_at_the_end_stays_out_of_the_tree(first: int) -> None:
    """A step in flight computes the sampled token, in the place of which a merged one is told."""
    b = bench()
    b.ask(0, [first, 5, 7], max_new_tokens=3, regex=grammar([[1, 2, 3, 4], [1], [9], [8], [7], [6]]))
    b.run()
    follow_up = [first, 5, 7, *b.out.outputs[0], 11]
    b.ask(1, follow_up, max_new_tokens=3)
    b.run()
    assert b.out.outputs[1] == free_oracle(follow_up, 3)


def test_steps_without_grammars_have_no_masks() -> None:
    b = bench()
    b.ask(0, [1, 2], max_new_tokens=4)
    b.run()
    assert all(plan.masked is None for plan in b.executor.plans)


def test_only_constrained_rows_are_masked() -> None:
    b = Bench(FakeExecutor(rows=4), eos_ids=(EOS,), grammars=FakeGrammars())
    b.ask(0, [1, 2], max_new_tokens=4)
    b.ask(1, [3, 4], max_new_tokens=4, regex=grammar(FREE))
    b.run()
    shared = [plan for plan in b.executor.plans if plan.masked is not None and len(plan.rows) == 2]
    assert shared and all(plan.masked is not None and plan.masked.sum() == 1 for plan in shared)
