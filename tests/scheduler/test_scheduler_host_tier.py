"""The tier below the device: what is copied when, and what a request finds there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from bough.core.control import CommandResult, CopyPagesIn, CopyPagesOut
from bough.core.model_config import KVGroup
from bough.core.plan import StepResult
from bough.core.settings import MemorySettings
from bough.memory.tree.events import HOST, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from bough.messages.requests import FlushCache
from bough.scheduler import host_tier
from bough.scheduler.assembly import PlannedStep
from bough.scheduler.host_tier import AT_ONCE, TRY_AGAIN, CopyRate, TieredCache
from tests.fakes.executor import FakeExecutor, FakeTicket, oracle
from tests.fakes.scheduler_bench import Bench

FIRST, OTHER = [1] * 30, [2] * 50  # 64 pages hold one of them with its answer, not both


def bench_of(
    policy: str = "write_through", host: int = 200, executor: FakeExecutor | None = None, **parts: Any
) -> Bench:
    executor = executor or FakeExecutor(chunk_tokens=64)
    memory = MemorySettings(hicache_write_policy=policy)
    return Bench(executor, memory=memory, host_pages=(host, *(200 for _ in executor.limits().groups[1:])), **parts)


def ask(bench: Bench, prompt: list[int], **options: Any) -> tuple[int, int | None]:
    """Runs a request; how many of its tokens were cached, and how many of those came from the host."""
    handle = len(bench.out.started)
    bench.ask(handle, prompt, max_new_tokens=2, **options)
    bench.run()
    assert bench.out.outputs[handle] == oracle(prompt, 2)
    started = bench.out.started[handle]
    return started.cached_tokens, started.host_tokens


def copied(bench: Bench, kind: type) -> int:
    return bench.executor.order.count(kind.__name__)


def tier(bench: Bench) -> TieredCache:
    assert isinstance(bench.scheduler._cache, TieredCache)
    return bench.scheduler._cache


def test_what_left_the_device_comes_back_from_the_host() -> None:
    bench = bench_of()
    assert [ask(bench, prompt) for prompt in (FIRST, OTHER, FIRST)] == [(0, 0), (0, 0), (29, 29 - 13)]
    assert bench.scheduler._cache.evicted > 0
    # Nothing of the third prompt but its last token was computed, and the copy came before that.
    last = [plan.step for plan in bench.executor.plans if len(plan.tokens)][-1]
    assert bench.executor.order.index("CopyPagesIn") < bench.executor.order.index(last)
    figures = tier(bench).figures
    assert figures["load_back_tokens_total"] == 16 and figures["hicache_bytes_in_total"] == 16 * 4
    assert figures["hicache_host_used_tokens"] == 31 + 51 == figures["hicache_bytes_out_total"] // 4


def test_without_a_tier_it_is_computed_and_answers_do_not_speak_of_one() -> None:
    bench = Bench(FakeExecutor(chunk_tokens=64))
    assert [ask(bench, prompt) for prompt in (FIRST, OTHER, FIRST)] == [(0, None), (0, None), (13, None)]
    assert not copied(bench, CopyPagesOut)


@pytest.mark.parametrize(
    ("policy", "copies"),
    [
        ("write_through", [1, 2]),  # when a request has ended
        ("write_through_selective", [0, 0]),
        ("write_back", [0, 1]),
    ],
)
def test_when_a_prefix_is_written(policy: str, copies: list[int]) -> None:
    bench, seen = bench_of(policy), []
    for prompt in (FIRST, OTHER):
        ask(bench, prompt)
        seen.append(copied(bench, CopyPagesOut))
    assert seen == copies


@pytest.mark.parametrize("pages", [64, 2000])
def test_of_many_requests_a_few_are_written_beside_each_plan(pages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in the end, and none later than what makes room for others on the device."""
    used, prompts = [], [[1 + i] * 5 for i in range(24)]
    for most in (3, 1000):
        monkeypatch.setattr(host_tier, "AT_ONCE", most)
        bench = bench_of(host=2000, executor=FakeExecutor(pages=pages, chunk_tokens=64))
        for handle, prompt in enumerate(prompts):
            bench.ask(handle, prompt, max_new_tokens=2)
        bench.run()
        assert not tier(bench).behind
        used.append((tier(bench).figures["hicache_host_used_tokens"], copied(bench, CopyPagesOut)))
    (few, times), (all_at_once, fewer_times) = used
    assert few == all_at_once and times > fewer_times
    assert few == 24 * 6 or pages == 64, "what leaves the device before its plan was launched is not copied"


def test_what_makes_room_before_the_next_plan_copies_what_has_just_ended() -> None:
    """Pages that come from another engine do."""
    bench = bench_of()
    bench.ask(0, FIRST, max_new_tokens=2)
    while 0 not in bench.out.ended:
        bench.turn()
    cache = tier(bench)
    cache.pool.give(cache.take(cache.pool.total))
    assert ask(bench, FIRST) == (29, 29)


def test_room_that_older_prefixes_make_waits_for_no_copy() -> None:
    """What has just ended is copied before it leaves the device, and not before what others leave."""
    bench = bench_of()
    ask(bench, FIRST)
    bench.ask(1, [3] * 20, max_new_tokens=2)
    while 1 not in bench.out.ended:
        bench.turn()
    cache, written = tier(bench), copied(bench, CopyPagesOut)
    cache.pool.give(cache.take(cache.pool.free + 31))  # what the first left
    assert copied(bench, CopyPagesOut) == written and len(cache._due) == 1
    cache.pool.give(cache.take(cache.pool.total))
    assert copied(bench, CopyPagesOut) == written + 1 and not cache._due
    assert not cache._reading.any()
    assert ask(bench, [3] * 20) == (19, 19)


def test_what_ends_without_a_further_page_is_copied_before_it_leaves() -> None:
    """The tree has used it last when its prompt was computed, and others since."""
    bench = bench_of(executor=FakeExecutor(page_size=4, chunk_tokens=8))
    bench.ask(0, FIRST[:8], max_new_tokens=3)
    bench.ask(1, [3] * 20, max_new_tokens=30)
    while 0 not in bench.out.ended:
        bench.turn()
    cache = tier(bench)
    assert len(cache._due) == 1
    cache.pool.give(cache.take(cache.available))
    assert cache.host.tree.match_length(np.array(FIRST[:8], dtype=np.int32)) == 8


def test_what_was_found_again_and_not_used_is_copied_before_it_leaves() -> None:
    """A request that had to wait for room looked for its prefix before."""
    bench = bench_of("write_through_selective")
    ask(bench, FIRST)
    ask(bench, [3] * 20)
    cache, key = tier(bench), np.array(FIRST, dtype=np.int32)
    match = cache.match_and_lock(key, "", touch=False)
    cache.unlock(cache.fetch(match, key, "", None))
    cache.launched()
    cache.pool.give(cache.take(cache.pool.total))
    assert cache.host.tree.match_length(key) == 30


def test_requests_that_go_on_ending_are_copied_as_fast_as_they_end() -> None:
    """Though all they have is there, so that nothing needs room."""
    bench = bench_of()
    ask(bench, FIRST)
    cache, ended = tier(bench), 3 * AT_ONCE
    node = cache.tree.match(np.array(FIRST, dtype=np.int32)).node
    for _ in range(6 * AT_ONCE):
        for _ in range(ended):
            cache.note(np.array(FIRST, dtype=np.int32), "", ended=node)
        cache.launched()
        cache.copy_out(resting=False)
    assert len(cache._due) < 2 * ended * AT_ONCE


def test_pages_that_come_back_lack_no_more_than_others() -> None:
    """What a draft model had left out of those that were there before tells nothing of them."""
    bench = bench_of()
    for prompt in (FIRST, OTHER):
        ask(bench, prompt)
    cache = tier(bench)
    cache.undrafted[:] = True
    assert ask(bench, FIRST) == (29, 16)
    (pages,) = cache.tree.pages_of(np.array(FIRST, dtype=np.int32))
    assert cache.undrafted[pages].tolist() == [True] * 13 + [False] * 16 + [True]


def test_selective_writes_what_was_found_again() -> None:
    bench = bench_of("write_through_selective")
    assert [ask(bench, prompt) for prompt in (FIRST, FIRST, OTHER, FIRST)] == [(0, 0), (29, 0), (0, 0), (29, 16)]


def test_the_host_forgets_what_was_used_least_recently() -> None:
    bench = bench_of(host=60)
    for prompt in (FIRST, OTHER):
        ask(bench, prompt)
    assert tier(bench).figures["hicache_evicted_tokens_total"] == 31 + 51 - 60
    assert ask(bench, FIRST) == (13, 0)


def test_namespaces_share_nothing_on_the_host_either() -> None:
    bench = bench_of()
    for prompt in (FIRST, OTHER):
        ask(bench, prompt, namespace="a")
    assert ask(bench, FIRST, namespace="b") == (0, 0)
    assert ask(bench, OTHER, namespace="b") == (0, 0)
    assert ask(bench, FIRST, namespace="a")[0] == 29


def test_a_flush_clears_the_host() -> None:
    bench = bench_of()
    for prompt in (FIRST, OTHER):
        ask(bench, prompt)
    bench.submit(FlushCache(0))
    bench.run()
    assert tier(bench).figures["hicache_host_used_tokens"] == 0 and bench.scheduler._cache.tree.total_pages == 0
    assert ask(bench, FIRST) == (0, 0)


@dataclass
class Recorder:
    events: list[KVEvent] = field(default_factory=list)

    def add(self, event: KVEvent) -> None:
        self.events.append(event)

    def flush(self) -> None:
        return


def test_events_name_the_tier() -> None:
    recorder = Recorder()
    bench = bench_of(events=recorder)
    for prompt in (FIRST, OTHER, FIRST):
        ask(bench, prompt)
    bench.submit(FlushCache(0))
    bench.run()
    held: dict[str | None, set[int]] = {}
    for event in recorder.events:
        match event:
            case BlockStored():
                held.setdefault(event.medium, set()).update(event.block_hashes)
            case BlockRemoved():
                assert held[event.medium] >= {*event.block_hashes}
                held[event.medium] -= {*event.block_hashes}
            case AllBlocksCleared():
                held["GPU"].clear()
    assert held == {"GPU": set(), HOST: set()}
    stored = [{*e.block_hashes} for e in recorder.events if isinstance(e, BlockStored) and e.medium == HOST]
    assert len(set().union(*stored)) == 31 + 51


@pytest.mark.parametrize("group", [KVGroup("window", 6), KVGroup("state")])
def test_further_groups_come_back_too(group: KVGroup) -> None:
    """In the third request nothing of the group is left on the device."""
    executor = FakeExecutor(chunk_tokens=15, groups=[(group, 26 if group.window else 9)])
    bench = bench_of(executor=executor)
    for prompt in (FIRST, OTHER):
        ask(bench, prompt)
    cached, host = ask(bench, FIRST)
    assert cached == (29 if group.window else 15) and host
    groups_copied = executor.order.count("CopyPagesIn")
    assert groups_copied == 2, "both groups"


class SlowCopies(FakeExecutor):
    """Copies of a megabyte per second."""

    def control(self, command: Any) -> Any:
        ticket = super().control(command)
        if isinstance(command, CopyPagesIn):
            nbytes = len(command.pages) * self.limits().copied_bytes(command.group)
            return FakeTicket(CommandResult(seconds=nbytes / 1e6))
        return ticket


@pytest.mark.parametrize(("tokens_per_s", "fetched"), [(None, 20), (1e3, 20), (1e6, 0)])
def test_what_takes_longer_to_fetch_than_to_compute_is_computed(tokens_per_s: float | None, fetched: int) -> None:
    """A token has 4 bytes, so 250,000 come in a second, once that is measured."""
    bench = bench_of(executor=SlowCopies(chunk_tokens=64))
    cache = tier(bench)
    for prompt in (FIRST, OTHER, FIRST, OTHER):  # the last two are fetched, and measured
        ask(bench, prompt)
    cache.take(64)  # evicts all that the device has
    cache.pool.give(np.arange(1, 65, dtype=np.int32))
    key = np.array(FIRST[:20], dtype=np.int32)
    match = cache.match_and_lock(key, "")
    match = cache.fetch(match, key, "", tokens_per_s)
    assert match.length == fetched
    assert cache.load_s == pytest.approx(fetched * 4 / 1e6)
    assert cache.figures["hicache_bytes_per_s"] == pytest.approx(1e6)
    cache.unlock(match)


def test_a_step_that_loads_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(executor=SlowCopies(chunk_tokens=64))
    loads, after_step = list[bool](), bench.scheduler._planner.after_step

    def noted(step: PlannedStep, result: StepResult) -> None:
        loads.append(step.loads)
        after_step(step, result)

    monkeypatch.setattr(bench.scheduler._planner, "after_step", noted)
    for prompt in (FIRST, OTHER, FIRST, OTHER, FIRST):
        loads.clear()
        ask(bench, prompt)
    assert loads[0] and not any(loads[1:]), "the first step of a prompt that came from the host"


def test_now_and_then_a_slow_copy_is_made_all_the_same() -> None:
    rate = CopyRate()
    assert rate.pays(100, 1, 1e6), "nothing is measured"
    rate.learn(100, 100.0)
    assert [rate.pays(100, 1, 1e6) for _ in range(2 * TRY_AGAIN)].count(True) == 2
    assert rate.pays(100, 100, 1.0) and not rate.pays(100, 100, 1.0, more_s=1.0)


@dataclass
class Below:
    """A tier that keeps what it is offered."""

    kept: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)

    def offer(self, tokens: Any, namespace: str, pages: Any, buffers: Any) -> None:
        self.kept[tuple(tokens.tolist())] = buffers[0][pages[0]].copy()


def test_a_tier_below_gets_what_is_written_and_hands_it_back() -> None:
    bench, below = bench_of(), Below()
    tier(bench).below = below
    ask(bench, FIRST)
    tier(bench)._finish_all()
    whole = max(below.kept, key=len)
    assert len(whole) == 31 and below.kept[whole].view(np.int32)[:, 0].tolist() == list(whole)
    bench.submit(FlushCache(0))
    bench.run()
    rows = np.arange(31, dtype=np.int32)
    tier(bench).adopt(np.array(whole, dtype=np.int32), "", [rows + 1], [below.kept[whole]])
    assert ask(bench, FIRST) == (29, 29)


def test_pages_are_not_reused_while_they_are_copied_out() -> None:
    """One row: the second request evicts what the first has just left, long before its copy is looked at again."""
    bench = bench_of(executor=FakeExecutor(rows=1, chunk_tokens=64))
    for handle, prompt in enumerate((FIRST, OTHER)):
        bench.ask(handle, prompt, max_new_tokens=1)
    bench.run()
    assert ask(bench, FIRST) == (29, 15)


def test_what_a_poisoned_request_has_computed_is_not_on_the_host_either() -> None:
    bench = bench_of()
    assert ask(bench, OTHER) == (0, 0)
    bench.executor.poisoned_rows.update(range(8))
    bench.ask(len(bench.out.started), FIRST, max_new_tokens=9)
    bench.run()
    bench.executor.poisoned_rows.clear()
    assert ask(bench, FIRST) == (0, 0) and ask(bench, OTHER)[0] > 0
    tier(bench).flush()
    assert not tier(bench).audit({}, []).problems


def test_what_was_in_the_tree_for_long_when_its_request_ends_is_copied_before_it_leaves() -> None:
    """Its last page is not whole, so the tree has known the rest since the prompt was computed; others came later."""
    bench = bench_of(executor=FakeExecutor(page_size=4, pages=64, chunk_tokens=64))
    bench.ask(0, [5] * 12, max_new_tokens=4)
    for handle in range(1, 5):
        bench.ask(handle, [10 + handle] * 8, max_new_tokens=1)
    while 0 not in bench.out.ended:
        bench.turn()
    cache = tier(bench)
    cache.pool.give(cache.take(cache.pool.total))
    assert ask(bench, [5] * 12 + [6])[0] == 12
