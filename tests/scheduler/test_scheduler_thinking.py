"""Thinking before a grammar: free while it lasts, bounded by its budget, and the answer valid after it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.finish import FinishLength, FinishStop
from bough.core.plan import mask_words
from bough.core.sampling_params import SamplingParams
from bough.messages.requests import Thinking
from bough.scheduler.constraint import Constraint, ThinkingTrack
from tests.fakes.executor import VOCAB, GuessingProposer
from tests.fakes.grammars import EOS, MERGED, PIECES, FakeCompiled, FakeGrammars, Places, grammar
from tests.fakes.scheduler_bench import Bench

START, END = 90, 91  # tokens that write nothing
CHOICE = [1, 2, 3, 40]
PLACES: Places = [CHOICE, [9], [8], [7], CHOICE]


def marks(**more: object) -> Thinking:
    return Thinking((START,), (END,), (10, END), **more)  # type: ignore[arg-type]


def allowed(constraint: Constraint, generated: int = 0) -> set[int]:
    words = np.zeros(mask_words(VOCAB), dtype=np.int32)
    constraint.allow(words, generated)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def constraint(thinking: Thinking, **sampling: object) -> Constraint:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Constraint(FakeCompiled(PLACES), params, {EOS}, (EOS,), thinking)


def test_an_answer_begins_with_thinking_or_with_the_grammar() -> None:
    for first in (START, 40):
        c = constraint(marks())
        assert allowed(c) == {1, 2, 3, 40, START, END}
        assert c.accept(first)
        assert allowed(c) == (set(range(VOCAB)) - {EOS} if first == START else {9})


def test_the_grammar_begins_behind_the_thinking() -> None:
    c = constraint(marks(begun=True))
    for token in (5, 50, 60):
        assert EOS not in allowed(c) and len(allowed(c)) == VOCAB - 1 and c.accept(token) and not c.forced()
    assert c.accept(END) and not c.forced() and allowed(c) == {1, 2, 3, 40}
    assert c.accept(40) and c.forced() == bytes([9, 8, 7])


def test_a_used_up_budget_ends_the_thinking() -> None:
    c = constraint(marks(begun=True, budget=2))
    assert c.accept(5) and c.accept(6)
    assert allowed(c) == {10} and c.accept(10)
    assert allowed(c) == {END} and c.accept(END)
    assert allowed(c) == {1, 2, 3, 40}


def test_markers_of_several_tokens() -> None:
    track = ThinkingTrack(Thinking((60, 61), (60, 62), (60, 62)))
    assert track.undecided and track.openings == (60,)
    track.open(60)
    assert set(track.openings) == {61, 62} and track.undecided
    track.open(62)
    assert track.over
    track = ThinkingTrack(Thinking((60, 61), (60, 62), (60, 62), begun=True))
    for token in (60, 60, 5, 60):
        track.think(token)
        assert not track.over
    track.think(62)
    assert track.over


SHARED = Thinking((1, 61), (1, 62), (1, 62))  # 1 is what an answer may begin with too
SPELT: Places = [[1, 40], [2, 9], CHOICE]


def undecided() -> Constraint:
    return Constraint(FakeCompiled(SPELT), SamplingParams(), {EOS}, (EOS,), SHARED)


def test_an_answer_may_begin_like_a_marker() -> None:
    c = undecided()
    assert allowed(c) == {1, 40, MERGED[1, 2]} and c.accept(1)
    assert allowed(c) == {2, 9, 61, 62} | {MERGED[2, b] for b in (1, 2, 3)}
    assert not c.forced() and c.accept(9) and allowed(c) == set(CHOICE)


def test_a_marker_may_begin_like_the_answer() -> None:
    c = undecided()
    assert c.accept(1) and c.accept(61) and allowed(c) == set(range(VOCAB)) - {EOS}
    assert c.accept(50) and c.accept(1) and c.accept(62)
    assert 1 in allowed(c) and c.accept(40) and allowed(c) >= {2, 9} and 61 not in allowed(c)


def test_an_end_unopened_puts_the_grammar_at_its_beginning() -> None:
    c = undecided()
    assert c.accept(1) and c.accept(62) and c.accept(1) and c.accept(9) and allowed(c) == set(CHOICE)


def test_a_marker_that_no_answer_begins_with_must_be_finished() -> None:
    c = Constraint(FakeCompiled([[40], [9]]), SamplingParams(), {EOS}, (EOS,), SHARED)
    assert allowed(c) == {40, 1} and c.accept(1) and allowed(c) == {61, 62}


def test_without_a_grammar_a_marker_is_not_pressed_on_the_answer() -> None:
    c = Constraint(None, SamplingParams(), {EOS}, (EOS,), Thinking((1, 61), (1, 62), (1, 62), budget=3))
    assert c.accept(1) and len(allowed(c)) == VOCAB and c.accept(7) and c.accept(61) and len(allowed(c)) == VOCAB


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_budget_without_a_grammar(overlap: bool, drafts: int) -> None:
    proposer = GuessingProposer(drafts) if drafts else None
    b = Bench(eos_ids=(EOS,), disable_overlap_schedule=not overlap, proposer=proposer)
    b.ask(0, [1, 2], max_new_tokens=12, thinking=marks(begun=True, budget=3), ignore_eos=True)
    b.run()
    output = b.out.outputs[0]
    assert len(output) == 12 and (END in output[:4] or output[3:5] == [10, END])
    assert b.out.ended[0] == FinishLength(12)


def test_there_are_drafts_behind_a_budget_and_no_end_before_its_time() -> None:
    """All that says nothing of the thinking itself is as it is without drafts."""
    found = []
    for proposer in (None, GuessingProposer(3)):
        b = Bench(eos_ids=(EOS,), proposer=proposer)
        for handle in range(8):
            b.ask(handle, [handle, 2], max_new_tokens=60, min_new_tokens=40, thinking=marks(begun=True, budget=3))
        b.run()
        found.append((dict(b.out.outputs), dict(b.out.ended)))
        assert all(EOS not in output[:40] for output in b.out.outputs.values())
    assert found[0] == found[1]
    assert b.scheduler._planner.drafting.held > 8 * 10
    assert b.scheduler._planner.figures["avg_spec_accept_length"] > 1.3


def test_behind_thinking_each_draft_has_a_mask_of_its_own() -> None:
    c = Constraint(None, SamplingParams(min_new_tokens=4), {EOS}, (EOS,), marks(begun=True, budget=9))
    assert not c.quick and c.accept(END) and c.quick
    lines = np.zeros((3, mask_words(VOCAB)), dtype=np.int32)
    c.allow_behind([5, 6, 7], [0, 1, 1], lines, 3)  # two behind the first
    ends = [bool(line[EOS // 32] >> EOS % 32 & 1) for line in lines]
    assert ends == [False, True, True]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 6)), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_whatever_is_thought_the_answer_follows_the_grammar(
    asked: list[tuple[bool, int]], overlap: bool, jumps: bool, drafts: bool
) -> None:
    b = Bench(
        eos_ids=(EOS,),
        grammars=FakeGrammars(),
        proposer=GuessingProposer(3) if drafts else None,
        disable_overlap_schedule=not overlap,
        disable_jump_forward=not jumps,
    )
    for handle, (begun, budget) in enumerate(asked):
        thinking = marks(begun=begun, budget=budget)
        b.ask(handle, [handle + 1, 2], max_new_tokens=40, regex=grammar(PLACES), thinking=thinking)
    b.run()
    for handle, (begun, _) in enumerate(asked):
        output = b.out.outputs[handle]
        assert b.out.ended[handle] == FinishStop(EOS)
        thought = begun or output[0] in (START, END)
        answer = output[output.index(END) + 1 :] if thought else output
        text = b"".join(PIECES[token] for token in answer)
        assert len(text) == len(PLACES) and all(byte in place for byte, place in zip(text, PLACES, strict=True))
