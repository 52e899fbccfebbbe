"""Masks that come late, never, or wrong: the row tries again, the others go on, and the answer is what it should be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bough.core.errors import RequestError
from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.core.plan import IntArray
from bough.messages.requests import LogprobRequest
from bough.scheduler import constraint, mask_work
from bough.scheduler.mask_work import MaskWork
from tests.fakes.executor import FakeExecutor
from tests.fakes.executor import oracle as free_oracle
from tests.fakes.grammars import (
    EOS,
    PIECES,
    FakeCompiled,
    FakeGrammars,
    FakeMatcher,
    FakeTicket,
    Places,
    grammar,
    oracle,
)
from tests.fakes.scheduler_bench import Bench

CHOICE = [1, 2, 3, 40]
FREE: Places = [CHOICE] * 6


class StrayMatcher(FakeMatcher):
    """Its masks allow more than it takes, as those of a library may."""

    def fill(self, mask: IntArray) -> None:
        super().fill(mask)
        if not self.can_end and not self.finished:
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
            bits[:64] = 1
            mask[:] = np.packbits(bits, bitorder="little").view(np.int32)


class OtherMatchers(FakeGrammars):
    """Grammars whose matchers are of another kind."""

    def __init__(self, make: Callable[[Places], FakeMatcher], *, tried: bool = True) -> None:
        super().__init__()
        self._make, self._tried = make, tried

    def request(self, spec):  # type: ignore[no-untyped-def]
        make, tried = self._make, self._tried

        class Ticket(FakeTicket):
            def result(self) -> FakeCompiled:
                places = super().result().places
                compiled = FakeCompiled(places, tried=tried)
                compiled.matcher = lambda: make(places)  # type: ignore[method-assign]
                return compiled

        return Ticket(spec, 0)


class Unpunctual(MaskWork):
    """Not one mask comes when it is first asked for."""

    def fill(self, words: IntArray, deadline: float | None = None) -> bool:
        self.asked = not getattr(self, "asked", False)
        return False if self.asked and deadline is not None else super().fill(words, deadline)


# Masks that are wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("logprobs", [None, LogprobRequest(start=0)])
def test_a_token_that_the_grammar_does_not_take_is_sampled_again(
    overlap: bool, logprobs: LogprobRequest | None
) -> None:
    b = Bench(eos_ids=(EOS,), grammars=OtherMatchers(StrayMatcher), disable_overlap_schedule=not overlap)
    for handle in range(4):
        b.ask(handle, [handle, 2, 3], max_new_tokens=20, regex=grammar(FREE), logprobs=logprobs)
    b.run()
    for handle in range(4):
        output = b.out.outputs[handle]
        text = b"".join(PIECES[token] for token in output)
        assert b.out.ended[handle] == FinishStop(EOS) and len(text) == 6 and set(text) <= set(CHOICE)
        if logprobs is not None:
            assert b.out.scored[handle] == output
    assert sum(len(plan.rows) for plan in b.executor.plans) > 4 * 8  # some were sampled more than once


def test_where_every_token_is_refused_the_request_ends_alone() -> None:
    class Stubborn(FakeMatcher):
        def accept(self, token: int) -> bool:
            return False

    b = Bench(eos_ids=(EOS,), grammars=OtherMatchers(Stubborn))
    b.ask(0, [1], max_new_tokens=5, regex=grammar(FREE))
    b.ask(1, [1], max_new_tokens=30)
    b.run()
    assert b.out.ended[0] == constraint.DEAD_END
    assert b.out.outputs[1] == free_oracle([1], 30, frozenset({EOS}))


# Masks that are late --------------------------------------------------------------------------------------------------

ASK = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.booleans(), st.integers(0, 12), st.booleans())
MACHINE = st.tuples(st.sampled_from([1, 2, 4]), st.integers(40, 80), st.integers(1, 4), st.integers(4, 20))


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ASK, min_size=1, max_size=8), MACHINE, st.booleans(), st.booleans())
def test_late_masks_change_nothing_but_the_time(  # type: ignore[no-untyped-def]
    monkeypatch, asked, machine, overlap, mixed
) -> None:
    monkeypatch.setattr(constraint, "MaskWork", Unpunctual)
    page_size, tokens, rows, chunk = machine
    executor = FakeExecutor(
        rows=rows, pages=tokens // page_size, page_size=page_size, context_length=48, chunk_tokens=max(chunk, page_size)
    )
    b = Bench(
        *(executor,),
        eos_ids=(EOS,),
        grammars=FakeGrammars(),
        disable_overlap_schedule=not overlap,
        enable_mixed_chunk=mixed,
        disable_jump_forward=True,
    )
    for handle, (prompt, constrained, max_new, scored) in enumerate(asked):
        options = {"regex": grammar(FREE)} if constrained else {}
        b.ask(handle, prompt, max_new_tokens=max_new, logprobs=LogprobRequest(start=0) if scored else None, **options)
    b.run(limit=1_000_000)  # turns go on while another thread works masks out
    for handle, (prompt, constrained, max_new, scored) in enumerate(asked):
        expected = (
            oracle(prompt, FREE, max_new, jumps=False)
            if constrained
            else free_oracle(prompt, max_new, frozenset({EOS}))
        )
        assert b.out.outputs[handle] == expected
        assert b.out.scored[handle] == (expected if scored else [])


def test_the_others_go_on_while_a_mask_is_worked_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The free request ends although the mask comes only after that; then the constrained one goes on."""
    monkeypatch.setattr(mask_work, "SLOW_S", -1.0)
    go_on = threading.Event()

    class Waiting(FakeMatcher):
        def fill(self, mask: IntArray) -> None:
            if self.taken:
                assert go_on.wait(30)
            super().fill(mask)

    b = Bench(eos_ids=(EOS,), grammars=OtherMatchers(Waiting))
    b.ask(0, [1, 2], max_new_tokens=20, regex=grammar(FREE))
    b.ask(1, [1, 2], max_new_tokens=12, ignore_eos=True)
    while 1 not in b.out.ended:
        b.turn()
    assert len(b.out.outputs[0]) == 1 and 0 not in b.out.ended
    assert sum(0 in plan.rows for plan in b.executor.plans) < 8  # it is not computed over and over meanwhile
    go_on.set()
    b.run()
    assert b.out.ended[1] == FinishLength(12)
    assert b.out.ended[0] == FinishStop(EOS) and b.out.outputs[0] == oracle([1, 2], FREE, 20, jumps=False)


def test_the_others_go_on_while_the_first_mask_of_a_grammar_is_worked_out() -> None:
    """How long it takes is unknown. Later requests with the grammar need no thread."""
    go_on = threading.Event()

    class Waiting(FakeMatcher):
        def fill(self, mask: IntArray) -> None:
            assert self.taken or go_on.wait(30)
            super().fill(mask)

    b = Bench(eos_ids=(EOS,), grammars=OtherMatchers(Waiting, tried=False), disable_jump_forward=True)
    b.ask(0, [1, 2], max_new_tokens=20, regex=grammar([CHOICE] * 8))
    b.ask(1, [1, 2], max_new_tokens=12, ignore_eos=True)
    while 1 not in b.out.ended:
        b.turn()
    assert 0 not in b.out.ended and not b.out.outputs[0]
    go_on.set()
    b.run(100_000)
    assert b.out.ended[0] == FinishStop(EOS) and b.out.outputs[0] == oracle([1, 2], [CHOICE] * 8, 20, jumps=False)
    compiled = FakeCompiled(FREE, tried=False)
    works = [MaskWork(FakeMatcher(FREE), compiled) for _ in range(2)]
    words = np.zeros(8, dtype=np.int32)
    for _ in range(mask_work.QUICK_RUN):
        assert not compiled.tried and works[0].fill(words, time.monotonic() + 30)
    assert compiled.tried and works[1].fill(words, 0.0)


def test_a_mask_that_takes_too_long_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_work, "SLOW_S", -1.0)
    monkeypatch.setattr(mask_work, "LIMIT_S", 0.01)
    ended = threading.Event()

    class Endless(FakeMatcher):
        def fill(self, mask: IntArray) -> None:
            while self.taken and not ended.is_set():
                super().fill(mask)
            super().fill(mask)

    b = Bench(eos_ids=(EOS,), grammars=OtherMatchers(Endless))
    b.ask(0, [1, 2], max_new_tokens=20, regex=grammar(FREE))
    b.run(100_000)
    ended.set()
    reason = b.out.ended[0]
    assert isinstance(reason, FinishAbort) and reason.status_code == 400 and "ambiguous" in reason.message


def test_masks_that_never_come_to_an_end_hold_up_no_other_slow_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_work, "SLOW_S", -1.0)
    monkeypatch.setattr(mask_work, "LIMIT_S", 0.01)
    ended = threading.Event()

    class Endless(FakeMatcher):
        def fill(self, mask: IntArray) -> None:
            while self.taken and len(self.places) == 7 and not ended.is_set():
                super().fill(mask)
            super().fill(mask)

    b = Bench(eos_ids=(EOS,), grammars=OtherMatchers(Endless))
    for handle in range(3):  # one more than there are places
        b.ask(handle, [1, 2], max_new_tokens=20, regex=grammar([CHOICE, *FREE]))
    b.ask(3, [1, 2], max_new_tokens=20, regex=grammar(FREE))
    b.run(1_000_000)
    ended.set()
    assert all(isinstance(b.out.ended[handle], FinishAbort) for handle in range(3))
    assert b.out.ended[3] == FinishStop(EOS) and b.out.outputs[3] == oracle([1, 2], FREE, 20, jumps=False)


def test_who_gets_no_place_for_a_slow_mask_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_work, "SLOW_S", -1.0)
    monkeypatch.setattr(mask_work, "WAIT_S", 0.01)
    monkeypatch.setattr(mask_work, "MOST", 0)  # as if masks that never come to an end had taken all
    b = Bench(eos_ids=(EOS,), grammars=FakeGrammars(), disable_jump_forward=True)
    b.ask(0, [1, 2], max_new_tokens=20, regex=grammar(FREE))
    b.run(100_000)
    reason = b.out.ended[0]
    assert isinstance(reason, FinishAbort) and reason.status_code == 503 and "try again later" in reason.message


def test_a_slow_back_end_that_gives_up_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_work, "SLOW_S", -1.0)

    class GivesUp(FakeMatcher):
        def fill(self, mask: IntArray) -> None:
            if self.taken:
                raise RequestError("Too many items.")
            super().fill(mask)

    b = Bench(eos_ids=(EOS,), grammars=OtherMatchers(GivesUp))
    b.ask(0, [1, 2], max_new_tokens=20, regex=grammar(FREE))
    b.run(100_000)
    assert b.out.ended[0] == FinishAbort("Too many items.")


def test_a_request_that_takes_more_than_its_share_of_the_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_work, "FAIR_S", -0.1)  # as if each token took that much
    b = Bench(eos_ids=(EOS,), grammars=FakeGrammars(), disable_jump_forward=True)
    b.ask(0, [1, 2], max_new_tokens=20, regex=grammar(FREE))
    b.ask(1, [1, 2], max_new_tokens=12, ignore_eos=True)
    b.run()
    reason = b.out.ended[0]
    assert isinstance(reason, FinishAbort) and reason.status_code == 400 and "ambiguous" in reason.message
    assert b.out.ended[1] == FinishLength(12)


def test_time_within_the_share_is_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_work, "FAIR_S", 10.0)
    work = MaskWork(FakeMatcher(FREE), FakeCompiled(FREE))
    work._debt_s = 0.2
    assert work.accept(1) and work._debt_s == 0.0
