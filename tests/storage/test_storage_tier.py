"""The tier below the host's memory: what is stored, which requests wait, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.control import SwapWeights
from bough.core.errors import SettingsError
from bough.core.model_config import KVGroup
from bough.core.settings import MemorySettings
from bough.messages.outputs import Reply
from bough.messages.requests import Abort, ChangeStorage, Control, FlushCache
from bough.scheduler.ports import CacheEvents
from bough.storage import tier as tier_module
from bough.storage.store import Store, run_keys
from bough.storage.tier import StoreTier, Transfers, open_tier, state_key
from tests.fakes.engine_pair import HERE, EnginePair
from tests.fakes.executor import FakeExecutor, make_groups, oracle
from tests.fakes.scheduler_bench import Bench
from tests.scheduler.test_scheduler_property import ACTIONS, CONFIG, MACHINE, STATES, WINDOWS, play
from tests.storage.test_storage_store import Kept

PROMPT = [1 + i % 90 for i in range(600)]
OTHER = [2, 3, 4]
MEMORY = {"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}


class SlowFuture(Future[Any]):
    """Its work is done when somebody has asked for its end so often."""

    def __init__(self, asks: int, work: Callable[[], Any]) -> None:
        super().__init__()
        self.asks, self.work = asks, work

    def done(self) -> bool:
        self.asks -= 1
        if self.asks < 0 and not super().done():
            try:
                self.set_result(self.work())
            except Exception as error:  # noqa: BLE001  (as an executor does)
                self.set_exception(error)
        return super().done()


class SlowThread:
    def __init__(self, asks: int = 0) -> None:
        self.asks = asks
        self.futures: list[SlowFuture] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> SlowFuture:
        self.futures.append(SlowFuture(self.asks, lambda: function(*args)))
        if not self.asks:
            self.futures[-1].done()
        return self.futures[-1]


@pytest.fixture(autouse=True)
def changes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_module, "in_daemon_thread", SlowThread().submit)


def with_store(tier: StoreTier, transfers: Transfers) -> StoreTier:
    tier.transfers, transfers.close = transfers, lambda: None  # type: ignore[method-assign]
    return tier


class Rig:
    """An engine over a store; `reads` says how often its end is asked for until a fetch has ended."""

    def __init__(
        self,
        kept: Any,
        *,
        reads: int = 0,
        writes: int = 0,
        identity: str = "model",
        policy: str = "wait_complete",
        backend: str = "file",
        events: CacheEvents | None = None,
        **machine: Any,
    ) -> None:
        options = {"pages": 1200 // machine.get("page_size", 1), "context_length": 1024, "chunk_tokens": 256}
        executor = FakeExecutor(**{**options, **machine})
        limits = executor.limits()
        self.transfers = Transfers(Store(kept), 1 << 20)
        self.reader = SlowThread(reads)
        self.transfers._reader, self.transfers._writer = self.reader, SlowThread(writes)  # type: ignore[assignment]
        settings = {**MEMORY, "hicache_storage_backend": backend, "hicache_storage_prefetch_policy": policy}
        memory = MemorySettings(**settings)
        self.tier = with_store(StoreTier(limits, memory, [identity]), self.transfers)
        pages = tuple(2 * count for count in limits.pages)
        parts = {"memory": memory, "host_pages": pages, "events": events}
        self.bench = Bench(executor, handover=lambda _, out: (self.tier, out), **parts)
        self.tier.reply = self.bench.out.reply

    def ask(self, prompt: list[int] = PROMPT, weights: str = "", **options: Any) -> tuple[int, tuple[int, str] | None]:
        """Runs a request; how many of its tokens were cached, and how many of those came from the store."""
        handle = len(self.bench.out.started)
        self.bench.ask(handle, prompt, max_new_tokens=2, **options)
        self.bench.run()
        assert self.bench.out.outputs[handle] == oracle(prompt, 2, weights=weights)
        started = self.bench.out.started[handle]
        return started.cached_tokens, started.storage

    def flush(self, *, storage: bool = False) -> None:
        self.bench.submit(ChangeStorage(0, "clear") if storage else FlushCache(0))
        self.bench.run()

    def change(self, action: Any, **given: str) -> Reply:
        self.bench.submit(ChangeStorage(7, action, {f"hicache_{name}": value for name, value in given.items()}))
        self.bench.run()
        return self.bench.out.replies[-1]

    @property
    def figures(self) -> dict[str, float]:
        return {name.removeprefix("hicache_storage_"): value for name, value in self.tier.figures.items()}


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("windows", [(), (6,), (300,)])
@pytest.mark.parametrize("states", [0, 1])
def test_another_engine_answers_from_the_store(page_size: int, windows: tuple[int, ...], states: int) -> None:
    kept = Kept()
    groups = [(KVGroup("window", window), 1200 // page_size) for window in windows]
    groups += [(KVGroup("state"), 16)] * states
    first, second = (Rig(kept, page_size=page_size, groups=groups) for _ in range(2))
    assert first.ask() == (0, None)
    assert first.ask([*PROMPT, 7])[1] is None, "it is on the device"
    assert first.figures["written_tokens_total"] == 512 and len(kept.values) == 2 * (1 + states)
    assert second.ask() == (512, (512, "file"))
    assert second.figures["read_tokens_total"] == 512 and second.figures["written_tokens_total"] == 0
    assert sum(len(plan.tokens) for plan in second.bench.executor.plans) == 600 - 512


def test_the_rest_of_a_prefix_comes_from_the_store() -> None:
    kept = Kept()
    first, second = Rig(kept), Rig(kept)
    first.ask()
    assert second.ask(PROMPT[:300]) == (256, (256, "file"))
    assert second.ask() == (512, (512 - 300, "file"))


def test_a_run_that_ends_with_an_answer_is_stored_though_nothing_comes_behind_it() -> None:
    kept = Kept()
    Rig(kept).ask(PROMPT[:511])
    assert len(kept.values) == 2


def test_names_keep_apart_what_differs() -> None:
    kept = Kept()
    first = Rig(kept)
    first.ask(namespace="salt")
    assert first.ask() == (0, None)
    kept.values = dict(list(kept.values.items())[:2])  # those of the salt
    assert Rig(kept).ask() == (0, None) and Rig(kept, identity="other").ask(namespace="salt") == (0, None)
    assert Rig(kept, page_size=2).ask(namespace="salt") == (0, None)
    assert Rig(kept).ask(namespace="salt") == (512, (512, "file"))


def test_what_a_poisoned_request_has_computed_is_not_in_the_store_either() -> None:
    kept = Kept()
    rig = Rig(kept)
    rig.ask(namespace="another")
    others = dict(kept.values)
    rig.ask()
    assert len(kept.values) == 4, "its prefix was stored before its numbers were known"
    rig.bench.executor.poisoned_rows.update(range(8))
    rig.bench.ask(2, [*PROMPT, 7], max_new_tokens=2)
    rig.bench.run()
    assert kept.values == others
    rig.bench.executor.poisoned_rows.clear()
    assert Rig(kept).ask() == (0, None), "another engine finds nothing"
    kept.values = dict(others)
    assert rig.ask() == (0, None) and len(kept.values) == 4, "what is right is stored again"


def test_a_damaged_run_is_computed_anew_and_written_again() -> None:
    kept = Kept()
    Rig(kept).ask()
    key, value = list(kept.values.items())[1]
    kept.values[key] = value[:-1] + bytes([value[-1] ^ 1])
    rig = Rig(kept)
    assert rig.ask() == (256, (256, "file")) and rig.figures["corrupt_runs_total"] == 1
    assert kept.values[key] == value and Rig(kept).ask() == (512, (512, "file"))


def test_a_flush_leaves_the_store_and_clearing_empties_it() -> None:
    rig = Rig(Kept())
    rig.ask()
    rig.flush()
    assert rig.ask() == (512, (512, "file"))
    rig.flush(storage=True)
    rig.flush()
    assert rig.ask() == (0, None)
    rig.flush()
    assert rig.ask() == (512, (512, "file")), "it was stored again"


def test_other_weights_find_nothing_of_the_former() -> None:
    """Whatever path they come from: it may hold others later. What is on its way is not stored under their names."""
    kept = Kept()
    rig = Rig(kept)
    rig.ask()
    before = {*kept.values}
    swap = Control(call=1, command=SwapWeights("b"), wait=True, flush_cache=True, facts={"model_path": "b"})
    for _ in range(2):
        rig.bench.submit(swap)
        rig.bench.run()
        assert rig.ask(weights="b") == (0, None)
        rig.flush()
        assert rig.ask(weights="b") == (512, (512, "file"))
    assert len(kept.values) == 6 and before < {*kept.values}
    assert Rig(kept).ask() == (512, (512, "file"))


def test_what_is_under_way_at_a_flush_is_not_offered() -> None:
    rig = Rig(Kept())
    rig.bench.ask(0, PROMPT, max_new_tokens=1)
    while not rig.bench.scheduler._cache.under_way:  # type: ignore[attr-defined]
        rig.bench.turn()
    rig.bench.scheduler._cache.flush()
    assert not rig.figures["written_tokens_total"]


def test_others_go_on_while_a_request_waits_for_all_of_its_runs() -> None:
    kept = Kept()
    Rig(kept).ask()
    rig = Rig(kept, reads=100)
    rig.bench.ask(0, PROMPT, max_new_tokens=2)
    rig.bench.ask(1, OTHER, max_new_tokens=2)
    rig.bench.turn(50)
    assert rig.bench.out.outputs == {1: oracle(OTHER, 2)}
    assert rig.bench.inbox.waits and None not in rig.bench.inbox.waits, "it looks again by itself"
    rig.bench.run()
    assert rig.bench.out.started[0].storage == (512, "file")


def test_best_effort_waits_no_longer_than_for_a_row() -> None:
    kept = Kept()
    Rig(kept).ask()
    rig = Rig(kept, reads=3, policy="best_effort")
    assert rig.ask() == (0, None)
    rig = Rig(kept, reads=3, policy="best_effort", rows=1)
    rig.bench.ask(0, OTHER, max_new_tokens=30)
    rig.bench.ask(1, PROMPT, max_new_tokens=2)
    rig.bench.run()
    assert rig.bench.out.started[1].storage == (512, "file")


def test_after_a_while_a_request_goes_on_with_what_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, clock = Kept(), [0.0]
    Rig(kept).ask()
    monkeypatch.setattr(tier_module.time, "monotonic", lambda: clock[0])
    rig = Rig(kept, reads=1000, policy="timeout")
    rig.bench.ask(0, PROMPT, max_new_tokens=2)
    rig.bench.turn(20)
    assert not rig.bench.out.started
    clock[0] = 2.0
    rig.bench.turn(20)
    assert rig.bench.out.outputs[0] == oracle(PROMPT, 2) and rig.bench.out.started[0].storage is None


@pytest.mark.parametrize(("tokens_per_s", "found"), [(0.1, 512), (1e6, 0)])
def test_what_the_store_gives_too_slowly_is_computed(
    tokens_per_s: float, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run takes a second; two of them are 512 tokens."""
    kept, clock, read = Kept(), [0.0], Kept.read
    Rig(kept).ask()

    def read_slowly(self: Kept, *args: Any) -> bool:
        clock[0] += 1.0
        return read(self, *args)

    monkeypatch.setattr(Kept, "read", read_slowly)
    monkeypatch.setattr(tier_module.time, "monotonic", lambda: clock[0])
    rig = Rig(kept)
    cache = rig.tier._cache
    assert rig.ask() == (512, (512, "file")), "nothing is measured"
    assert rig.tier._rate.bytes_per_s == rig.tier.run_bytes
    for number in range(2):
        rig.flush()
        cache.tokens_per_s = tokens_per_s
        before = kept.calls
        assert rig.ask()[0] == found
        assert (kept.calls > before) == bool(found), number


def test_the_way_from_the_host_to_the_device_counts_as_well() -> None:
    kept = Kept()
    Rig(kept).ask()
    rig = Rig(kept)
    rig.tier._rate.bytes_per_s, rig.tier._cache.tokens_per_s = 2.0 * rig.tier.run_bytes, 512.0
    rig.tier._cache.rate.bytes_per_s = 1.0
    assert rig.ask() == (0, None)
    rig.flush()
    rig.tier._cache.tokens_per_s, rig.tier._cache.rate.bytes_per_s = 511.0, None
    assert rig.ask() == (512, (512, "file"))


def attachable(rig: Rig, kept: Kept, reads: int = 0) -> Rig:
    """Its next store is this one."""

    def opened(memory: MemorySettings, check: bool = False) -> Transfers:
        assert check
        transfers = Transfers(Store(kept), 1 << 20)
        transfers._reader, transfers._writer = SlowThread(reads), SlowThread()  # type: ignore[assignment]
        transfers.close = lambda: None  # type: ignore[method-assign]
        return transfers

    rig.tier.open = opened  # type: ignore[method-assign]
    return rig


def without_store(kept: Kept, **machine: Any) -> Rig:
    rig = attachable(Rig(kept, **machine), kept)
    assert rig.change("detach").ok
    rig.tier._memory = MemorySettings(enable_hierarchical_cache=True, hicache_storage_prefetch_policy="wait_complete")
    return rig


@pytest.mark.parametrize("states", [0, 1])
def test_a_store_comes_and_goes(states: int) -> None:
    kept, groups = Kept(), {"groups": [(KVGroup("state"), 16)] * states}
    rig = without_store(kept, **groups)
    assert rig.ask() == (0, None) and not kept.values
    assert "hicache_storage_failures_total" not in rig.bench.scheduler._state()
    assert rig.bench.scheduler._state()["hicache_storage_backend"] is None
    rig.flush()
    assert rig.change("attach", storage_backend="redis") == Reply(7, True, "The store is attached.")
    state = rig.bench.scheduler._state()
    assert state["hicache_storage_backend"] == "redis" and state["hicache_storage_prefetch_policy"] == "wait_complete"
    other = [5, *PROMPT]
    rig.ask(other)
    assert len(kept.values) == 2 * (1 + states), "what is computed from now on is stored"
    rig.flush()
    assert rig.ask(other) == (512, (512, "redis"))
    assert rig.change("detach").ok and len(kept.values) == 2 * (1 + states)
    rig.flush()
    assert rig.ask(other) == (0, None)
    rig.ask([6, *PROMPT])
    assert len(kept.values) == 2 * (1 + states)
    rig.change("attach", storage_backend="file")
    rig.flush()
    assert rig.ask(other) == (512, (512, "file")), "the same runs by another name"


def test_what_was_cached_before_is_stored_with_what_follows_it() -> None:
    kept = Kept()
    rig = without_store(kept)
    rig.ask()
    rig.change("attach", storage_backend="file")
    rig.ask([*PROMPT, 7])
    assert len(kept.values) == 2 and Rig(kept).ask() == (512, (512, "file"))


def test_a_store_that_goes_keeps_no_request_waiting() -> None:
    kept = Kept()
    Rig(kept).ask()
    rig = attachable(Rig(kept, reads=10_000), kept)
    for handle, prompt in enumerate((PROMPT, OTHER, [*PROMPT, 8])):
        rig.bench.ask(handle, prompt, max_new_tokens=20)
    rig.bench.turn(5)
    assert len(rig.tier) == 2
    assert rig.change("detach").ok
    assert [rig.bench.out.outputs[n] for n in range(3)] == [oracle(p, 20) for p in (PROMPT, OTHER, [*PROMPT, 8])]
    assert not len(rig.tier) and not rig.tier._wanted and len(kept.values) == 2


def test_a_store_comes_while_requests_run() -> None:
    kept = Kept()
    rig = without_store(kept)
    for handle in range(6):
        rig.bench.ask(handle, [handle, *PROMPT], max_new_tokens=30)
    rig.bench.turn(8)
    rig.bench.submit(ChangeStorage(1, "attach", {"hicache_storage_backend": "file"}))
    rig.bench.run()
    assert rig.bench.out.replies[-1].ok
    assert all(rig.bench.out.outputs[handle] == oracle([handle, *PROMPT], 30) for handle in range(6))
    assert Rig(kept).ask([5, *PROMPT]) == (512, (512, "file"))


def test_weights_that_changed_before_the_store_came_are_not_taken_for_the_former() -> None:
    kept = Kept()
    Rig(kept).ask()
    rig, before = without_store(kept), dict(kept.values)
    rig.bench.submit(Control(call=1, command=SwapWeights("b"), wait=True, flush_cache=True, facts={"model_path": "b"}))
    rig.bench.run()
    rig.change("attach", storage_backend="file")
    assert rig.ask(weights="b") == (0, None)
    rig.flush()
    assert rig.ask(weights="b") == (512, (512, "file"))
    assert before.items() < kept.values.items() and Rig(kept).ask() == (512, (512, "file"))


def test_changes_of_the_store_that_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    rig = attachable(Rig(kept), kept)
    assert rig.change("attach", storage_backend="redis") == Reply(
        7, False, "A store (file) is attached; detach it first."
    )
    options = {"storage_backend": "file", "storage_backend_extra_config": '{"max_bytes": 5}'}
    assert not rig.change("attach", **options).ok
    options = {"storage_backend": "file", "storage_prefetch_policy": "best_effort", "write_policy": "write_back"}
    assert rig.change("attach", **options).ok, "of the same one the policies change"
    shown = rig.bench.scheduler._state()
    assert (shown["hicache_storage_prefetch_policy"], shown["hicache_write_policy"]) == ("best_effort", "write_back")
    assert rig.tier._cache._policy == "write_back"
    with patch.object(kept, "clear", side_effect=IndexError("no")):
        rig.tier.transfers.store.clear = kept.clear  # type: ignore[union-attr]
        assert rig.change("clear") == Reply(7, False, "The store cannot be cleared: no.") and "Traceback" in caplog.text
    assert rig.change("detach").ok and rig.change("detach") == Reply(7, True, "No store is attached.")
    assert rig.change("clear") == Reply(7, False, "No store is attached.")
    rig.bench.submit(*(ChangeStorage(call, "attach", {"hicache_storage_backend": "file"}) for call in (1, 2)))
    with patch.object(tier_module, "in_daemon_thread", SlowThread(3).submit):
        rig.bench.run()
    assert [(each.call, each.ok) for each in rig.bench.out.replies[-2:]] == [(2, False), (1, True)]
    assert rig.ask() == (0, None)


def test_a_store_that_does_not_answer_is_not_attached(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """At the start of an engine it may be late."""
    monkeypatch.setenv("BOUGH_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    tier = open_tier(FakeExecutor().limits(), MemorySettings(enable_hierarchical_cache=True), [])
    bench = Bench(memory=MemorySettings(), host_pages=(256,), handover=lambda _, out: (tier, out))
    tier.reply = bench.out.reply
    for backend, options, said in (
        ("file", '{"max_bytes": 9}', "larger max_bytes"),
        ("lmcache", '{"url": "lm://127.0.0.1:1"}', "lmcache_server"),
        ("memory", '{"url": "ipc:///no/such/socket"}', "does not answer"),
    ):
        chosen = {"hicache_storage_backend": backend, "hicache_storage_backend_extra_config": options}
        with patch("bough.storage.memory.TIMEOUT_MS", 200):
            bench.submit(ChangeStorage(3, "attach", chosen))
            bench.run()
        reply = bench.out.replies[-1]
        assert not reply.ok and said in reply.message, reply
        assert bench.scheduler._state()["hicache_storage_backend"] is None
    bench.submit(ChangeStorage(4, "attach", {"hicache_storage_backend": "file"}))
    bench.run()
    assert bench.out.replies[-1].ok
    tier.close()


def test_an_engine_without_the_tier_above_has_no_store() -> None:
    bench = Bench()
    bench.submit(*(ChangeStorage(1, action) for action in ("attach", "detach", "clear")))
    bench.run()
    assert all(not each.ok and "--enable-hierarchical-cache" in each.message for each in bench.out.replies)
    assert len(bench.out.replies) == 3


def test_an_aborted_request_stops_its_fetch() -> None:
    kept = Kept()
    Rig(kept).ask()
    rig, calls = Rig(kept, reads=50), kept.calls
    rig.bench.ask(0, PROMPT)
    rig.bench.turn(5)
    rig.bench.submit(Abort(0))
    rig.bench.run()
    assert kept.calls == calls and not rig.tier.busy and not len(rig.tier)


def test_a_prompt_begins_with_the_last_state_that_the_store_has() -> None:
    """A state is kept at the last whole run of each prompt, and where a chunk ends. Runs without one are of no use."""
    kept, states = Kept(), {"groups": [(KVGroup("state"), 16)], "chunk_tokens": 1024}
    first = Rig(kept, **states)
    first.ask(PROMPT[:300])
    assert [sum(plan.query_lens) for plan in first.bench.executor.plans[:2]] == [256, 44]
    first.ask([*PROMPT, *PROMPT[:200]])
    assert len(kept.values) == 3 + 2, "runs, and states behind the first one and the last one"
    second = Rig(kept, **states)
    assert second.ask() == (256, (256, "file")), "two runs, but behind the second one there is no state"
    assert Rig(kept, **states).ask([*PROMPT, *PROMPT[:200], 1]) == (768, (768, "file"))
    run = run_keys((*second.tier._identity, ""), np.array(PROMPT))[0]
    del kept.values[run]
    assert Rig(kept, **states).ask(PROMPT[:300]) == (0, None), "a state without its run"
    assert run in kept.values, "it was stored again"


def test_a_damaged_state_is_written_again_and_the_one_before_it_serves() -> None:
    kept = Kept()
    rig = Rig(kept, groups=[(KVGroup("state"), 16)])
    rig.ask()
    first, last = (state_key(key) for key in run_keys((*rig.tier._identity, ""), np.array(PROMPT)))
    for name, found in ((last, 256), (first, 0)):
        value = kept.values[name]
        kept.values[name] = value[:-1] + bytes([value[-1] ^ 1])
        rig.flush()
        assert rig.ask() == (found, (found, "file") if found else None) and kept.values[name] == value
        kept.values.pop(last)
    assert rig.figures["corrupt_runs_total"] == 2


def tier_over(kept: Kept, reads: int = 0, policy: str = "wait_complete") -> Callable[[Any], StoreTier]:
    """For an executor."""

    def tier(executor: Any) -> StoreTier:
        transfers = Transfers(Store(kept), 1 << 20)
        transfers._reader, transfers._writer = SlowThread(reads), SlowThread()  # type: ignore[assignment]
        memory = MemorySettings(**MEMORY, hicache_storage_prefetch_policy=policy)
        return with_store(StoreTier(executor.limits(), memory, []), transfers)

    return tier


def test_what_a_later_copy_still_fills_is_not_stored() -> None:
    """The host evicts a prompt that is on its way there, and takes it again into other pages, whose copy comes later
    than the first one's end: what these hold until then must not be stored as the prompt."""
    written = []
    for host in (2400, 700):
        kept = Kept()
        machine = FakeExecutor(pages=4000, context_length=1024, chunk_tokens=2048)
        tier, memory = tier_over(kept)(machine), MemorySettings(**MEMORY)
        bench = Bench(machine, host_pages=(host,), memory=memory, handover=lambda _, out, side=tier: (side, out))
        for handle, prompt in enumerate((PROMPT, [3 + i % 80 for i in range(600)])):
            bench.ask(handle, prompt, max_new_tokens=20)
        bench.turn()
        bench.ask(2, [*PROMPT, 7], max_new_tokens=2)
        bench.run()
        written.append(kept.values)
    assert len(written[0]) == 4 and written[1].items() <= written[0].items()


@pytest.fixture
def pair_over() -> Iterator[Callable[..., EnginePair]]:
    """Engines of a pair over one store, with runs of 8 tokens."""

    def make(kept: Kept, reads: int = 0, **options: Any) -> EnginePair:
        return EnginePair(
            lambda: FakeExecutor(pages=256, chunk_tokens=8), host_pages=(512,), tier=tier_over(kept, reads), **options
        )

    with patch("bough.storage.store.RUN_TOKENS", 8), patch("bough.storage.tier.RUN_TOKENS", 8):
        yield make


def test_engines_of_a_pair_answer_from_a_store(pair_over: Callable[..., EnginePair]) -> None:
    """The prefill engine reads it; the decode engine does for what it computes itself."""
    kept, prompt = Kept(), PROMPT[:60]
    for computed in (60, 4):
        pair = pair_over(kept, reads=3, home=HERE)
        pair.ask(1, prompt, max_new_tokens=4)
        pair.run()
        assert pair.decode.out.outputs[1] == oracle(prompt, 4) and pair.used_pages() == (0, 0)
        assert pair.prefill.executor.computed_tokens == computed
        assert pair.decode.scheduler._state()["transfers"] == 1 and len(kept.values) >= 7
    assert pair.decode.out.started[1].storage == (56, "file")
    pair = pair_over(kept, home=HERE)
    pair.kill("prefill")
    pair.ask(1, prompt, max_new_tokens=4, bootstrap=None)
    pair.run()
    assert pair.decode.out.outputs[1] == oracle(prompt, 4) and pair.decode.out.started[1].storage == (56, "file")


@pytest.mark.parametrize("turns", range(1, 12, 2))
@pytest.mark.parametrize("left", ["client", "decode", "prefill"])
def test_whoever_leaves_while_the_store_is_read_leaves_nothing(
    pair_over: Callable[..., EnginePair], turns: int, left: str
) -> None:
    kept, prompt = Kept(), PROMPT[:60]
    first = pair_over(kept)
    first.ask(1, prompt, max_new_tokens=5)
    first.run()
    pair = pair_over(kept, reads=20)
    pair.ask(1, prompt, max_new_tokens=5)
    pair.turn(turns)
    if left == "client":
        pair.decode.submit(Abort(1))
    else:
        pair.kill(left)
    pair.wait(6.0)
    for name in ("prefill", "decode"):
        assert not pair.alive[name] or not pair.left(name)
    assert all(used == 0 for used, alive in zip(pair.used_pages(), pair.alive.values(), strict=True) if alive)


def test_what_cannot_be_stored_is_refused_at_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("BOUGH_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "kv"))
    small = MemorySettings(**MEMORY, hicache_storage_backend_extra_config='{"max_bytes": 1000}')
    with pytest.raises(SettingsError, match="larger max_bytes"):
        open_tier(FakeExecutor().limits(), small, [])
    open_tier(FakeExecutor().limits(), MemorySettings(**MEMORY), []).close()


POLICIES = st.sampled_from(["timeout", "best_effort", "wait_complete"])


@settings(deadline=None, max_examples=50)
@given(ACTIONS, CONFIG, MACHINE, WINDOWS, STATES, POLICIES, st.integers(0, 12), st.data())
def test_any_load_ends_well_with_a_store(  # type: ignore[type-arg]
    actions: list,
    config: dict,
    machine: tuple,
    windows: list,
    spare: list,
    policy: str,
    reads: int,
    data: st.DataObject,
) -> None:
    """Twice: the second engine finds what the first has stored, and some of it damaged."""
    page_size, _, rows, _ = machine
    groups, kept = make_groups(page_size, rows, windows, spare), Kept()
    pages = data.draw(st.tuples(*(st.integers(1, 90) for _ in range(1 + len(groups)))))
    memory = MemorySettings(**MEMORY, hicache_storage_prefetch_policy=policy)

    changes, slow = data.draw(st.sets(st.integers(1, 60))), SlowThread(data.draw(st.integers(0, 5)))

    def tier(executor: Any, outbox: Any) -> Any:
        """The store goes, and comes again, in these turns."""
        made, turns = tier_over(kept, reads, policy)(executor), [0]
        passed = made.passed

        def changing() -> Any:
            turns[0] += 1
            if turns[0] in changes:
                here = made._memory.hicache_storage_backend is not None
                made.change_storage(ChangeStorage(0, *(["detach"] if here else ["attach", MEMORY])))  # type: ignore[arg-type]
            return passed()

        made.open = lambda *_: tier_over(kept, reads, policy)(executor).transfers  # type: ignore[method-assign]
        made.passed = changing  # type: ignore[method-assign]
        return made, outbox

    with (
        patch("bough.storage.store.RUN_TOKENS", 4),
        patch("bough.storage.tier.RUN_TOKENS", 4),
        patch("bough.storage.tier.in_daemon_thread", slow.submit),
    ):
        for _ in range(2):
            play(actions, config, machine, True, groups=groups, memory=memory, host_pages=pages, handover=tier)
            for key in data.draw(st.sets(st.sampled_from([*kept.values]))) if kept.values else ():
                kept.values[key] = kept.values[key][:-1] + bytes([kept.values[key][-1] ^ 1])
