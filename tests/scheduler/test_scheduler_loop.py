"""The loop over a fake executor whose output depends on every page that was read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bough.core.finish import FinishAbort, FinishLength, FinishStop
from bough.core.settings import MemorySettings
from bough.messages.requests import Abort, FlushCache, GetState, LogprobRequest, Shutdown, StreamEnded
from bough.scheduler import loop
from tests.fakes.boxes import generate
from tests.fakes.executor import VOCAB, FakeExecutor, oracle
from tests.fakes.scheduler_bench import Bench

OVERLAP = pytest.mark.parametrize("disable_overlap_schedule", [False, True])
MIXED = pytest.mark.parametrize("enable_mixed_chunk", [False, True])
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16, 64])


def prompt_of(seed: int, length: int) -> list[int]:
    return [(seed * 31 + i * 7 + i * i * seed) % VOCAB for i in range(length)]


@OVERLAP
@MIXED
@PAGE_SIZES
def test_many_requests_get_what_each_would_get_alone(
    page_size: int, enable_mixed_chunk: bool, disable_overlap_schedule: bool
) -> None:
    executor = FakeExecutor(rows=4, pages=512 // page_size, page_size=page_size, chunk_tokens=max(16, page_size))
    bench = Bench(executor, enable_mixed_chunk=enable_mixed_chunk, disable_overlap_schedule=disable_overlap_schedule)
    prompts = {h: prompt_of(h, 3 + 5 * h % 40) for h in range(12)}
    for handle, prompt in prompts.items():
        bench.ask(handle, prompt, max_new_tokens=1 + handle % 9)
    bench.run()
    for handle, prompt in prompts.items():
        assert bench.out.outputs[handle] == oracle(prompt, 1 + handle % 9)
        assert bench.out.ended[handle] == FinishLength(1 + handle % 9)


@OVERLAP
@pytest.mark.parametrize(("page_size", "pages", "max_new"), [(1, 96, 30), (4, 24, 30), (16, 6, 30), (64, 8, 70)])
def test_a_small_pool_retracts_and_loses_nothing(
    page_size: int, pages: int, max_new: int, disable_overlap_schedule: bool
) -> None:
    executor = FakeExecutor(rows=6, pages=pages, page_size=page_size, context_length=100, chunk_tokens=64)
    # A conservativeness of 0 reserves nothing for the future, so the pool must overflow.
    bench = Bench(executor, disable_overlap_schedule=disable_overlap_schedule, schedule_conservativeness=0.0)
    for handle in range(6):
        bench.ask(handle, prompt_of(handle, 10 + handle), max_new_tokens=max_new)
    bench.run()
    for handle in range(6):
        assert bench.out.outputs[handle] == oracle(prompt_of(handle, 10 + handle), max_new)
    assert sum(bench.out.retractions.values()) > 0


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "dfs-weight", "lof", "random", "priority"])
def test_a_shared_prefix_is_computed_once_under_every_policy(policy: str) -> None:
    executor = FakeExecutor(rows=8, pages=256, chunk_tokens=16)
    bench = Bench(executor, schedule_policy=policy)
    prefix = prompt_of(1, 20)
    for handle in range(6):
        bench.ask(handle, [*prefix, 50 + handle], max_new_tokens=1)
    bench.run()
    assert executor.computed_tokens == len(prefix) + 6
    cached = sorted(s.cached_tokens for s in bench.out.started.values())
    assert cached == [0] + [20] * 5


def test_cached_tokens_are_the_shared_prefix_exactly() -> None:
    bench = Bench(FakeExecutor(pages=256))
    first = prompt_of(2, 30)
    bench.ask(1, first, max_new_tokens=4)
    bench.run()
    answer = bench.out.outputs[1]
    bench.ask(2, first, max_new_tokens=1)
    bench.ask(3, [*first[:17], 90, 91], max_new_tokens=1)
    bench.ask(4, first + answer[:3] + [5], max_new_tokens=1)
    bench.run()
    assert [bench.out.started[h].cached_tokens for h in (1, 2, 3, 4)] == [0, 29, 17, 33]


@pytest.mark.parametrize("overlap", [True, False])
def test_of_an_answer_all_that_was_computed_is_cached(overlap: bool) -> None:
    """The last token is, where the next step was launched before anybody knew that it was the last."""
    bench, prompt = Bench(disable_overlap_schedule=not overlap), prompt_of(2, 5)
    answer = oracle(prompt, 4)
    bench.ask(1, prompt, max_new_tokens=4, namespace="length")
    bench.ask(2, prompt, max_new_tokens=9, namespace="stop", stop_token_ids=(answer[-1],))
    bench.run()
    for handle, namespace in ((3, "length"), (4, "stop")):
        bench.ask(handle, [*prompt, *answer, 5], max_new_tokens=1, namespace=namespace)
    bench.run()
    assert bench.out.outputs[1] == bench.out.outputs[2] == answer
    assert [bench.out.started[h].cached_tokens for h in (3, 4)] == [8, 9 if overlap else 8]


def test_namespaces_never_share() -> None:
    bench = Bench()
    for handle, namespace in enumerate(["", "a", "b", "a"]):
        bench.ask(handle, prompt_of(3, 12), max_new_tokens=2, namespace=namespace)
        bench.run()
    assert [bench.out.started[h].cached_tokens for h in range(4)] == [0, 0, 0, 11]


def test_without_the_radix_cache_nothing_is_shared() -> None:
    bench = Bench(memory=MemorySettings(disable_radix_cache=True))
    for handle in range(3):
        bench.ask(handle, prompt_of(3, 12), max_new_tokens=5)
    bench.run()
    assert all(s.cached_tokens == 0 for s in bench.out.started.values())
    assert all(bench.out.outputs[h] == oracle(prompt_of(3, 12), 5) for h in range(3))


def test_end_of_sequence_and_stop_ids_end_a_request_with_the_token() -> None:
    prompt = prompt_of(4, 9)
    free = oracle(prompt, 12)
    bench = Bench(eos_ids=(free[5],))
    bench.ask(1, prompt, max_new_tokens=12)
    bench.ask(2, prompt, max_new_tokens=12, stop_token_ids=(free[2],))
    bench.ask(3, prompt, max_new_tokens=12, ignore_eos=True)
    bench.run()
    assert bench.out.outputs[1] == free[:6] and bench.out.ended[1] == FinishStop(free[5])
    assert bench.out.outputs[2] == free[:3] and bench.out.ended[2] == FinishStop(free[2])
    assert bench.out.outputs[3] == free and bench.out.ended[3] == FinishLength(12)


def test_zero_new_tokens_fill_the_cache_and_end() -> None:
    bench = Bench()
    bench.ask(1, prompt_of(5, 10), max_new_tokens=0)
    bench.run()
    assert bench.out.ended[1] == FinishLength(0) and bench.out.outputs[1] == []
    bench.ask(2, [*prompt_of(5, 10), 3], max_new_tokens=1)
    bench.run()
    assert bench.out.started[2].cached_tokens == 10


def test_decodes_ride_along_with_a_long_prompt() -> None:
    executor = FakeExecutor(rows=4, pages=256, context_length=200, chunk_tokens=8)
    bench = Bench(executor)
    bench.ask(1, prompt_of(1, 4), max_new_tokens=40)
    bench.turn(3)
    bench.ask(2, prompt_of(2, 64), max_new_tokens=1)
    before = len(executor.plans)
    bench.turn(8)
    assert all(len(plan.rows) == 2 for plan in executor.plans[before : before + 8])


def test_a_request_that_could_never_fit_is_refused_with_the_numbers() -> None:
    bench = Bench(FakeExecutor(pages=32, context_length=64))
    bench.ask(1, prompt_of(1, 40), max_new_tokens=1)
    bench.ask(2, prompt_of(1, 10), max_new_tokens=1000)
    bench.ask(3, [], max_new_tokens=1)
    bench.ask(4, [VOCAB], max_new_tokens=1)
    bench.ask(5, [-1], max_new_tokens=1)
    bench.run()
    refusal = bench.out.ended[1]
    assert isinstance(refusal, FinishAbort) and "40" in refusal.message and "31" in refusal.message
    assert bench.out.ended[2] == FinishLength(22)
    for handle, words in ((3, "empty"), (4, "outside the vocabulary"), (5, "outside the vocabulary")):
        reason = bench.out.ended[handle]
        assert isinstance(reason, FinishAbort) and words in reason.message


def test_too_long_for_the_context_can_be_cut_instead() -> None:
    bench = Bench(FakeExecutor(pages=256, context_length=32), allow_auto_truncate=True)
    bench.ask(1, prompt_of(1, 60), max_new_tokens=5)
    bench.run()
    assert bench.out.outputs[1] == oracle(prompt_of(1, 60)[:31], 1)


def test_a_full_queue_refuses_with_429() -> None:
    bench = Bench(max_queued_requests=2)
    for handle in range(4):
        bench.ask(handle, prompt_of(handle, 5), max_new_tokens=1)
    bench.run()
    reasons = [bench.out.ended[h] for h in range(4)]
    assert [isinstance(r, FinishAbort) and r.status_code == 429 for r in reasons] == [False, False, True, True]


@pytest.mark.parametrize("turns", range(7))
def test_abort_at_any_moment_frees_everything(turns: int) -> None:
    bench = Bench(FakeExecutor(rows=1, chunk_tokens=4))
    bench.ask(1, prompt_of(1, 12), max_new_tokens=20)
    bench.ask(2, prompt_of(2, 12), max_new_tokens=5)
    bench.turn(turns)
    bench.submit(Abort(1))
    bench.run()
    assert isinstance(bench.out.ended[1], FinishAbort)
    assert bench.out.outputs[2] == oracle(prompt_of(2, 12), 5)


def test_abort_all_and_unknown_handles() -> None:
    bench = Bench()
    for handle in range(3):
        bench.ask(handle, prompt_of(handle, 5), max_new_tokens=50)
    bench.turn(3)
    bench.submit(Abort(99), Abort(None))
    bench.run()
    assert all(isinstance(bench.out.ended[h], FinishAbort) for h in range(3))


def test_a_stream_that_the_detokenizer_ended_is_freed_without_a_word() -> None:
    bench = Bench()
    bench.ask(1, prompt_of(1, 5), max_new_tokens=50)
    bench.turn(4)
    bench.submit(StreamEnded(1), StreamEnded(7))
    bench.run()
    assert 1 not in bench.out.ended


def test_poisoned_logits_end_one_request_alone() -> None:
    executor = FakeExecutor()
    bench = Bench(executor)
    for handle in range(3):
        bench.ask(handle, prompt_of(handle, 6), max_new_tokens=6)
    executor.poisoned_rows.add(1)
    bench.run()
    failed = [h for h in range(3) if isinstance(bench.out.ended[h], FinishAbort)]
    assert len(failed) == 1
    assert all(bench.out.outputs[h] == oracle(prompt_of(h, 6), 6) for h in range(3) if h not in failed)


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_a_poisoned_request_has_computed_is_read_by_nobody(page_size: int) -> None:
    """Its keys and values may be what is not finite: a request with the same prompt must compute its own."""
    executor = FakeExecutor(chunk_tokens=8, page_size=page_size)
    bench = Bench(executor)
    prompt, other = prompt_of(1, 20), prompt_of(2, 20)
    bench.ask(0, other, max_new_tokens=3)
    bench.run()
    executor.poisoned_rows |= set(range(8))
    for handle in (1, 2):  # the second reads what the first one computes
        bench.ask(handle, prompt, max_new_tokens=6)
    bench.run()
    assert all(isinstance(bench.out.ended[handle], FinishAbort) for handle in (1, 2))
    executor.poisoned_rows.clear()
    for handle, tokens in ((3, prompt), (4, other)):
        bench.ask(handle, tokens, max_new_tokens=6)
        bench.run()
        assert bench.out.outputs[handle] == oracle(tokens, 6)
    assert bench.out.started[3].cached_tokens == 0 and bench.out.started[4].cached_tokens >= 16
    assert not bench.scheduler._cache.tree.check()


def test_a_request_that_waits_for_memory_is_not_looked_up_in_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(FakeExecutor(pages=64, chunk_tokens=64), memory=MemorySettings(radix_eviction_policy="lfu"))
    prefix = prompt_of(1, 20)
    bench.ask(0, prefix, max_new_tokens=1)
    bench.run()
    bench.ask(1, prompt_of(2, 10), max_new_tokens=40)
    bench.turn(3)
    tree, looked = bench.scheduler._cache.tree, list[int]()
    match = tree.match
    hits = match(np.array(prefix[:9]), touch=False).node.hits

    def noted(key: Any, *args: Any, **options: Any) -> Any:
        looked.append(len(key))
        return match(key, *args, **options)

    monkeypatch.setattr(tree, "match", noted)
    bench.ask(2, prefix + prompt_of(3, 20), max_new_tokens=10)
    bench.turn(20)
    assert 2 not in bench.out.started and 0 < len(looked) < 4
    assert match(np.array(prefix[:9]), touch=False).node.hits == hits + 1  # one request has used it
    bench.run()
    assert bench.out.outputs[2] == oracle(prefix + prompt_of(3, 20), 10)


def test_prompt_logprobs_start_where_asked_and_cap_the_match() -> None:
    bench = Bench(FakeExecutor(chunk_tokens=5))
    prompt = prompt_of(6, 17)
    bench.ask(1, prompt, max_new_tokens=1)
    bench.run()
    bench.ask(2, prompt, max_new_tokens=1, logprobs=LogprobRequest(start=4))
    bench.run()
    run = bench.out.started[2].input_logprobs
    assert run is not None and bench.out.started[2].cached_tokens == 4
    assert np.frombuffer(run.tokens, np.int32).tolist() == prompt[5:]
    bench.ask(3, prompt, max_new_tokens=1, logprobs=LogprobRequest(start=17))
    bench.run()
    assert isinstance(bench.out.ended[3], FinishAbort)


def test_waiting_and_running_timeouts() -> None:
    bench = Bench(FakeExecutor(rows=1, context_length=600, pages=600), waiting_timeout_s=5.0, running_timeout_s=20.0)
    bench.ask(1, prompt_of(1, 5), max_new_tokens=500)
    bench.ask(2, prompt_of(2, 5), max_new_tokens=5)
    bench.turn(2)
    bench.now = 6.0
    bench.turn()
    assert isinstance(bench.out.ended[2], FinishAbort) and "waited" in bench.out.ended[2].message
    assert 1 not in bench.out.ended
    bench.now = 30.0
    bench.run()
    assert isinstance(bench.out.ended[1], FinishAbort) and "ran longer" in bench.out.ended[1].message


def preempted_bench(**settings: float) -> Bench:
    """Request 1 ran for ten seconds in the only row, then an urgent request took it; the clock stands at ten."""
    executor = FakeExecutor(rows=1, context_length=600, pages=600)
    bench = Bench(executor, schedule_policy="priority", **settings)
    bench.ask(1, prompt_of(1, 5), max_new_tokens=500)
    bench.turn(3)
    bench.now = 10.0
    bench.ask(2, prompt_of(2, 5), max_new_tokens=500, priority=50)
    bench.turn(3)
    assert 2 in bench.out.started and 1 not in bench.out.ended
    return bench


def test_a_retracted_request_has_not_waited_while_it_ran() -> None:
    bench = preempted_bench(waiting_timeout_s=5.0)
    bench.now = 14.0
    bench.turn()
    assert 1 not in bench.out.ended
    bench.now = 16.0
    bench.turn()
    assert isinstance(bench.out.ended[1], FinishAbort) and "waited" in bench.out.ended[1].message


def test_a_retracted_request_does_not_run_while_it_waits() -> None:
    bench = preempted_bench(running_timeout_s=15.0)
    bench.now = 20.0
    bench.submit(Abort(2))
    bench.turn(3)  # request 1 runs again
    bench.now = 24.0
    bench.turn()
    assert 1 not in bench.out.ended
    bench.now = 26.0
    bench.turn()
    assert isinstance(bench.out.ended[1], FinishAbort) and "ran longer" in bench.out.ended[1].message


def test_queue_time_ends_when_a_request_is_first_admitted() -> None:
    bench = Bench(FakeExecutor(rows=1))
    bench.ask(1, prompt_of(1, 5), max_new_tokens=20)
    bench.ask(2, prompt_of(2, 5), max_new_tokens=1)
    bench.turn(2)
    bench.now = 3.0
    bench.run()
    assert [bench.out.started[h].queue_time_s for h in (1, 2)] == [0.0, 3.0]


@pytest.mark.parametrize("max_prefill_tokens", [1, 8, 17])
def test_a_prefill_limit_below_a_page_means_a_page(max_prefill_tokens: int) -> None:
    executor = FakeExecutor(page_size=16, pages=16, chunk_tokens=32)
    bench = Bench(executor, max_prefill_tokens=max_prefill_tokens)
    bench.ask(1, prompt_of(1, 40), max_new_tokens=3)
    bench.run(limit=50)
    assert bench.out.outputs[1] == oracle(prompt_of(1, 40), 3)
    assert max(plan.query_lens.sum() for plan in executor.plans) <= max(16, max_prefill_tokens)


def test_a_scheduler_that_can_neither_run_nor_wait_stops_with_a_message() -> None:
    # An executor that breaks its promise: its steps are smaller than a page and smaller than the prompt.
    bench = Bench(FakeExecutor(page_size=16, pages=16, chunk_tokens=8))
    bench.ask(1, prompt_of(1, 40), max_new_tokens=3)
    with pytest.raises(RuntimeError, match=r"1 requests \(1 of them waiting\).*defect"):
        bench.turn()


def test_the_books_are_checked_when_it_stays_quiet_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    audits: list[int] = []

    audit = loop.Scheduler._audit

    def count(scheduler: loop.Scheduler) -> None:
        audits.append(len(bench.out.ended))
        audit(scheduler)

    monkeypatch.setattr(loop.Scheduler, "_audit", count)
    bench = Bench()
    bench.ask(1, prompt_of(1, 5), max_new_tokens=2)
    bench.inbox.later = [[generate(2, prompt_of(2, 5), max_new_tokens=2)], [generate(3, prompt_of(3, 5))]]
    bench.run()
    assert audits == [3], "once, and after all three: each next request came within the quiet second"
    assert bench.inbox.waits == [1.0, 1.0, 1.0, None]
    bench.submit(GetState(1))
    bench.run()
    assert audits == [3], "nothing has run since"


def test_postponed_work_is_done_before_the_scheduler_waits() -> None:
    executor = FakeExecutor()
    bench = Bench(executor)
    executor.postponed = 3
    bench.submit(GetState(1))
    bench.turn(3)
    assert executor.postponed == 0 and bench.inbox.waits == []
    bench.run()
    assert bench.out.replies[0].data["warming_up"] and bench.inbox.waits == [None]


def test_under_load_the_executor_gets_a_pause_between_steps_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the tokens of the step before have been sent; never while a step is launched."""
    executor = FakeExecutor(pages=256)
    bench = Bench(executor)
    sent, idle = list[int](), executor.idle

    def noted(busy: bool = False) -> bool:
        sent.extend([len(bench.out.outputs[1])] if busy else [])
        return idle(busy)

    monkeypatch.setattr(executor, "idle", noted)
    bench.ask(1, prompt_of(1, 5), max_new_tokens=50)
    bench.turn(50)
    assert executor.pauses == [1 + 1, 33 + 1], "the step behind it runs meanwhile"
    assert sent == [1, 33]


def test_two_requests_may_have_the_same_rid() -> None:
    bench = Bench(FakeExecutor(page_size=4, pages=32))  # the audit of every turn sees the pages of both
    for handle in (1, 2):
        bench.ask(handle, prompt_of(handle, 5), max_new_tokens=3, rid="same")
    bench.run()
    assert all(bench.out.outputs[h] == oracle(prompt_of(h, 5), 3) for h in (1, 2))


def test_an_urgent_request_preempts_and_the_other_resumes() -> None:
    executor = FakeExecutor(rows=1, pages=64)
    bench = Bench(executor, schedule_policy="priority")
    bench.ask(1, prompt_of(1, 8), max_new_tokens=20, priority=0)
    bench.turn(5)
    bench.ask(2, prompt_of(2, 8), max_new_tokens=3, priority=5)
    bench.ask(3, prompt_of(3, 8), max_new_tokens=3, priority=50)
    bench.turn(3)
    bench.submit(GetState(1))
    bench.run()
    bench.submit(GetState(2))
    bench.turn()
    states = [reply.data for reply in bench.out.replies]
    assert [state["num_retracted_reqs"] for state in states] == [1, 0], "waits to run again, has done so"
    assert [state["num_retractions"] for state in states] == [1, 1]
    assert bench.out.retractions == {1: 1, 2: 0, 3: 0}
    assert list(bench.out.ended) == [3, 2, 1]
    for handle, count in ((1, 20), (2, 3), (3, 3)):
        assert bench.out.outputs[handle] == oracle(prompt_of(handle, 8), count)


def test_flush_waits_for_quiet_and_state_tells_the_load() -> None:
    bench = Bench()
    bench.ask(1, prompt_of(1, 8), max_new_tokens=8)
    bench.submit(FlushCache(10), GetState(11))
    bench.run()
    bench.submit(FlushCache(12))
    bench.run()
    bench.submit(GetState(13))
    bench.run()
    replies = {r.call: r for r in bench.out.replies}
    assert not replies[10].ok and replies[12].ok
    assert replies[11].data["num_waiting_reqs"] == 1
    assert replies[13].data["cached_prefix_tokens"] == 0 and replies[13].data["generated_tokens"] == 8


def test_shutdown_answers_everyone() -> None:
    bench = Bench()
    bench.ask(1, prompt_of(1, 8), max_new_tokens=8)
    bench.submit(Shutdown())
    bench.scheduler.run()
    assert isinstance(bench.out.ended[1], FinishAbort)
