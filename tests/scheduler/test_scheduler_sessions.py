"""Sessions: what a request of one goes on behind, what stays in the tree for it, and when that is given up."""

from __future__ import annotations

from typing import Any

import pytest

from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.core.settings import MemorySettings
from bough.messages.requests import Abort, ChangeSession, FlushCache, GetState, SessionParams, StreamEnded
from bough.scheduler import sessions
from tests.fakes.executor import FakeExecutor, oracle
from tests.fakes.scheduler_bench import Bench


def opened(executor: FakeExecutor | None = None, timeout_s: float | None = None, **options: Any) -> Bench:
    bench = Bench(executor, **options)
    bench.submit(ChangeSession(1, "s", timeout_s=timeout_s))
    bench.turn()
    assert bench.out.replies[-1].ok
    return bench


def ask(bench: Bench, handle: int, prompt: list[int], *, run: bool = True, new: int = 4, **params: Any) -> list[int]:
    """What the session's request has generated."""
    bench.ask(handle, prompt, max_new_tokens=new, session=SessionParams("s", **params))
    if run:
        bench.run()
    return bench.out.outputs[handle]


def refusal(bench: Bench, handle: int) -> str:
    reason = bench.out.ended[handle]
    assert isinstance(reason, FinishAbort) and reason.status_code == 400
    return reason.message


def pinned(bench: Bench) -> int:
    assert bench.scheduler._cache.tree.protected_pages == bench.scheduler._cache.pinned_pages()
    return bench.scheduler._cache.pinned_pages()


@pytest.mark.parametrize("page_size", [1, 4])
def test_requests_go_on_behind_each_other_and_find_what_was_computed(page_size: int) -> None:
    bench = opened(FakeExecutor(page_size=page_size))
    first = ask(bench, 1, [1, 2, 3])
    assert first == oracle([1, 2, 3], 4)
    before = [1, 2, 3, *first]
    assert ask(bench, 2, [9, 9], rid="r1") == oracle([*before, 9, 9], 4)
    started = bench.out.started[2]
    assert started.prompt_tokens == 9 and started.cached_tokens == 6 - 6 % page_size
    # Another branch of the same request, one without its output, one cut to four tokens, and a second conversation.
    assert ask(bench, 3, [8], rid="r1") == oracle([*before, 8], 4)
    assert ask(bench, 4, [7], rid="r1", drop_previous_output=True) == oracle([1, 2, 3, 7], 4)
    assert ask(bench, 5, [6], rid="r1", offset=4) == oracle([*before[:4], 6], 4)
    assert ask(bench, 6, [6], rid="r1", offset=-1) == oracle([*before[:-1], 6], 4)
    assert ask(bench, 7, [5, 5]) == oracle([5, 5], 4)
    assert ask(bench, 8, [], rid="r3", drop_previous_output=True) == bench.out.outputs[3]


def test_branches_stay_until_the_session_is_closed() -> None:
    bench = opened(FakeExecutor(pages=64))
    ask(bench, 1, [1, 2, 3, 4], new=8)
    assert pinned(bench) == 11  # the last token was never computed
    for handle in range(2, 12):  # twice the pool
        bench.ask(handle, [handle] * 8, max_new_tokens=4)
        bench.run()
    ask(bench, 20, [5], rid="r1")
    assert bench.out.started[20].cached_tokens == 11
    bench.submit(ChangeSession(2, "s", open=False), GetState(3))
    bench.run()
    assert bench.out.replies[-2].ok and bench.out.replies[-1].data["num_open_sessions"] == 0
    assert pinned(bench) == 0
    ask(bench, 21, [5], rid="r1")
    assert "not open" in refusal(bench, 21)


def test_pins_yield_to_requests_that_need_the_pages() -> None:
    bench = opened(FakeExecutor(pages=32))
    for handle in (1, 2):
        ask(bench, handle, [handle] * 6, new=5)
    assert pinned(bench) == 20
    bench.ask(3, [3] * 12, max_new_tokens=20)  # all pages
    bench.run()
    assert bench.out.ended[3] == FinishLength(20) and pinned(bench) == 0
    assert bench.out.retractions[3] == 0
    assert ask(bench, 4, [4], rid="r1") == oracle([*[1] * 6, *bench.out.outputs[1], 4], 4)


def test_a_flush_gives_pins_up() -> None:
    bench = opened()
    ask(bench, 1, [1, 2, 3])
    bench.submit(FlushCache(2))
    bench.run()
    assert bench.out.replies[-1].ok and bench.scheduler._cache.tree.total_pages == pinned(bench) == 0
    ask(bench, 2, [4], rid="r1")
    assert bench.out.started[2].cached_tokens == 0 and bench.out.outputs[2]


def test_without_a_tree_sessions_remember_tokens_alone() -> None:
    bench = opened(memory=MemorySettings(disable_radix_cache=True))
    first = ask(bench, 1, [1, 2, 3])
    assert ask(bench, 2, [4], rid="r1") == oracle([1, 2, 3, *first, 4], 4)
    assert pinned(bench) == 0


def test_what_is_replaced_ends_and_is_forgotten() -> None:
    bench = opened()
    ask(bench, 1, [1, 2, 3])
    ask(bench, 2, [4], rid="r1")
    ask(bench, 3, [5], rid="r2")
    ask(bench, 4, [6], rid="r1", new=50, run=False)
    bench.turn(4)
    assert ask(bench, 5, [7], rid="r1", replace=True) == oracle([1, 2, 3, *bench.out.outputs[1], 7], 4)
    reason = bench.out.ended[4]
    assert isinstance(reason, FinishAbort) and reason.status_code == 499 and "replaced" in reason.message
    for handle, rid in ((6, "r2"), (7, "r3"), (8, "r4")):
        ask(bench, handle, [8], rid=rid)
        assert f"no request {rid!r}" in refusal(bench, handle)
    ask(bench, 9, [9], replace=True)
    assert bench.scheduler._sessions._open["s"].branches.keys() == {"r9"}
    assert bench.scheduler._sessions._places.keys() == {9} and bench.scheduler._sessions._tokens == 5
    assert pinned(bench) == 4


def test_a_request_that_runs_is_not_gone_on_behind_but_replaced() -> None:
    bench = opened()
    ask(bench, 1, [1, 2, 3], new=50, run=False)
    bench.turn(6)
    ask(bench, 2, [4], rid="r1", run=False)
    bench.turn()
    assert "still runs" in refusal(bench, 2)
    assert ask(bench, 3, [5], rid="r1", drop_previous_output=True, run=False) == []
    bench.turn()
    ask(bench, 4, [6], rid="r1", replace=True)
    said = bench.out.outputs[1]
    assert 0 < len(said) < 50 and bench.out.outputs[4] == oracle([1, 2, 3, *said, 6], 4)
    assert isinstance(bench.out.ended[3], FinishAbort)  # it stood behind the one that was replaced


def test_of_an_answer_that_its_text_ends_later_tokens_are_no_part() -> None:
    bench = opened()
    said = ask(bench, 1, [1, 2, 3], new=50, run=False)
    bench.turn(8)
    bench.submit(StreamEnded(1, 2))
    bench.turn(2)
    assert len(said) > 2 and ask(bench, 2, [4], rid="r1") == oracle([1, 2, 3, *said[:2], 4], 4)
    ask(bench, 3, [5, 5])  # one that has ended by itself when the word comes
    bench.submit(StreamEnded(3, 1))
    bench.run()
    assert ask(bench, 4, [6], rid="r3") == oracle([5, 5, bench.out.outputs[3][0], 6], 4)


def test_a_token_that_ends_an_answer_and_an_abort_leave_what_there_was() -> None:
    said = oracle([1, 2, 3], 8)
    bench = opened(eos_ids=(said[2],))
    assert ask(bench, 1, [1, 2, 3]) == said[: said.index(said[2]) + 1]
    assert isinstance(bench.out.ended[1], FinishStop)
    ask(bench, 2, [7, 7], new=50, run=False)
    bench.turn(5)
    bench.submit(Abort(2))
    bench.run()
    for handle, rid, prompt in ((3, "r1", [1, 2, 3]), (4, "r2", [7, 7])):
        ask(bench, handle, [9], rid=rid)
        expected = [*prompt, *bench.out.outputs[int(rid[1:])], 9]
        assert bench.out.outputs[handle] == oracle(expected, 4, frozenset({said[2]}))


def test_a_session_that_is_not_used_expires_unless_it_runs() -> None:
    bench = opened(timeout_s=10.0)
    ask(bench, 1, [1, 2, 3])
    bench.now += 9.0
    ask(bench, 2, [4], rid="r1", new=400, run=False)
    bench.turn(3)
    bench.now += 100.0
    bench.turn()
    assert len(bench.scheduler._sessions) == 1
    bench.run()
    bench.now += 11.0
    bench.turn()
    assert len(bench.scheduler._sessions) == 0 and pinned(bench) == 0
    bench.submit(ChangeSession(2, "s"))
    bench.turn()
    bench.now += sessions.IDLE_S + 1
    bench.turn()
    assert len(bench.scheduler._sessions) == 0


def test_a_session_expires_while_the_engine_rests() -> None:
    bench = opened(timeout_s=10.0)
    ask(bench, 1, [1, 2, 3])
    assert bench.inbox.waits[-1] == 10.0, "it sleeps no longer than until then"
    bench.now += 11.0
    bench.submit(ChangeSession(2, "s", open=False), ChangeSession(3, "s", timeout_s=10.0))
    bench.turn()
    assert [reply.ok for reply in bench.out.replies[-2:]] == [False, True]
    ask(bench, 2, [1, 2, 3])
    bench.now += 11.0
    ask(bench, 3, [4], rid="r2")
    assert "has expired" in refusal(bench, 3) and pinned(bench) == 0
    bench.run()
    assert bench.inbox.waits[-1] is None


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = opened()
    ask(bench, 1, [1, 2, 3])
    ask(bench, 2, [4], rid="nobody")
    assert "no request 'nobody'" in refusal(bench, 2)
    bench.ask(3, [5], rid="r1", session=SessionParams("s"))
    bench.run()
    assert "already" in refusal(bench, 3)
    bench.ask(4, [5], max_new_tokens=1, session=SessionParams("other"))
    bench.run()
    assert "'other' is not open" in refusal(bench, 4)
    ask(bench, 5, [5] * 100000, rid="r1")
    assert "longer" in refusal(bench, 5) or "exceeds" in refusal(bench, 5)
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 1)
    monkeypatch.setattr(sessions, "MOST_TOKENS", 6)
    ask(bench, 6, [5])
    assert "7 tokens" in refusal(bench, 6)
    bench.submit(ChangeSession(2, "s"), ChangeSession(3, "t"), ChangeSession(4, "u", open=False))
    bench.run()
    texts = [reply.message for reply in bench.out.replies[-3:] if not reply.ok]
    assert ["open already" in texts[0], "the most" in texts[1], "not open" in texts[2]] == [True] * 3


def test_requests_of_a_closed_session_run_on() -> None:
    bench = opened()
    ask(bench, 1, [1, 2, 3], new=20, run=False)
    bench.turn(3)
    bench.submit(ChangeSession(2, "s", open=False))
    bench.run()
    assert bench.out.ended[1] == FinishLength(20) and pinned(bench) == 0


def test_the_audit_counts_locks_that_no_session_holds(caplog: pytest.LogCaptureFixture) -> None:
    bench = opened()
    ask(bench, 1, [1, 2, 3])
    bench.scheduler._audit()
    assert not caplog.text
    bench.scheduler._cache._pins.clear()
    bench.scheduler._audit()
    assert "6 pages are locked, but sessions keep 0" in caplog.text
