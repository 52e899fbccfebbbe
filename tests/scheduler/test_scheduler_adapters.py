"""Adapters in the scheduler: slots, waiting for one, and what cannot be loaded or unloaded."""

from __future__ import annotations

from typing import Any

import pytest

from bough.core.finish import FinishAbort, FinishLength
from bough.core.settings import LoraSettings
from bough.messages.requests import ChangeAdapters, GetState
from bough.scheduler.planner import SLOT_WAIT_S
from tests.fakes.scheduler_bench import Bench


def bench_with(*names: str, **lora: Any) -> Bench:
    bench = Bench(lora=LoraSettings(**lora))
    for call, name in enumerate(names):
        bench.submit(ChangeAdapters(call, name, f"/{name}"))
    bench.turn()
    assert all(reply.ok for reply in bench.out.replies)
    return bench


def told(bench: Bench, message: ChangeAdapters) -> str:
    """What a change that is refused is told."""
    bench.submit(message)
    bench.turn()
    assert not bench.out.replies[-1].ok
    return bench.out.replies[-1].message


def test_rows_get_the_slot_in_which_their_adapter_stands() -> None:
    bench = bench_with("a", "b", "c", max_loras_per_batch=2)
    for handle, name in enumerate(["a", "", "b", "c", "a", "c", "b", ""], 1):
        bench.ask(handle, [handle, 2, 3], max_new_tokens=4, adapter=name)
        placed = len(bench.executor.plans)
        bench.run()
        assert bench.out.ended[handle] == FinishLength(4)
        (setup,) = (setup for plan in bench.executor.plans[placed:] for setup in plan.setups)
        assert bench.executor.placed.get(setup.adapter, "") == name
    # a, b; c in the place of a, a in that of b, b in that of a: c was used since.
    assert bench.executor.order.count("PlaceAdapter") == 5


def test_a_request_without_a_slot_lets_others_pass() -> None:
    bench = bench_with("a", "b", max_loras_per_batch=1)
    bench.ask(1, [1, 2], max_new_tokens=20, adapter="a")
    bench.turn(2)
    bench.ask(2, [3, 4], max_new_tokens=2, adapter="b")
    bench.ask(3, [5, 6], max_new_tokens=2)
    bench.ask(4, [7, 8], max_new_tokens=2, adapter="a")
    bench.turn(8)
    assert {3, 4} <= bench.out.ended.keys() and not {1, 2} & bench.out.ended.keys()
    bench.run()
    assert bench.out.ended.keys() == {1, 2, 3, 4}


def test_a_request_that_has_waited_long_for_a_slot_is_the_next_of_those_with_adapters() -> None:
    bench = bench_with("a", "b", max_loras_per_batch=1)
    bench.ask(1, [1, 2], max_new_tokens=20, adapter="a")
    bench.turn(2)
    bench.ask(2, [3, 4], max_new_tokens=2, adapter="b")
    bench.turn()
    bench.now += SLOT_WAIT_S + 1
    bench.ask(3, [5, 6], max_new_tokens=2)
    bench.ask(4, [7, 8], max_new_tokens=2, adapter="a")
    bench.turn(8)
    assert bench.out.ended.keys() == {3}
    bench.run()
    assert list(bench.out.ended) == [3, 1, 2, 4]


def test_prefixes_are_shared_within_an_adapter_alone() -> None:
    bench = bench_with("a", "b")
    prompt, cached = [1, 2, 3, 4, 5], []
    for handle, name in enumerate(["a", "b", "", "a", "b", ""], 1):
        bench.ask(handle, prompt, max_new_tokens=2, adapter=name)
        bench.run()
        cached.append(bench.out.started[handle].cached_tokens)
    assert cached == [0, 0, 0, 4, 4, 4]


def test_a_client_cannot_name_the_namespace_of_an_adapter() -> None:
    bench = bench_with("a")
    bench.ask(1, [1, 2, 3], max_new_tokens=2, adapter="a", namespace="x\0y")
    bench.run()
    (key,) = {bench.scheduler._adapters.namespace("a", "x\0y")}
    assert "\0" not in key and key not in ("", "x\0y")


def test_an_adapter_in_use_is_not_unloaded() -> None:
    bench = bench_with("a", "b")
    bench.ask(1, [1, 2], max_new_tokens=9, adapter="a")
    bench.turn(2)
    assert "1 requests use the adapter 'a'" in told(bench, ChangeAdapters(7, "a"))
    bench.submit(ChangeAdapters(8, "b"))
    bench.run()
    assert bench.out.replies[-1].ok and bench.out.ended[1] == FinishLength(9)
    bench.submit(ChangeAdapters(9, "a"), GetState(10))
    bench.run()
    assert bench.out.replies[-1].data["loaded_adapters"] == {}
    bench.ask(2, [1, 2], adapter="a")
    bench.run()
    refused = bench.out.ended[2]
    assert isinstance(refused, FinishAbort) and refused.status_code == 404 and "no adapter 'a'" in refused.message


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (ChangeAdapters(7, "a", "/x"), "loaded already"),
        (ChangeAdapters(7, "", "/x"), "empty"),
        (ChangeAdapters(7, "absent"), "no adapter 'absent'; loaded are: a, b"),
        (ChangeAdapters(7, "c", "missing"), "There is no such adapter"),
        (ChangeAdapters(7, "c", "/c"), "--max-loaded-loras"),
    ],
)
def test_what_cannot_be_done_says_why(message: ChangeAdapters, text: str) -> None:
    most = 2 if message.path == "/c" else 3
    assert text in told(bench_with("a", "b", max_loaded_loras=most), message)


def test_pinned_adapters_keep_their_slots_and_leave_one() -> None:
    bench = bench_with("b", "c", max_loras_per_batch=2)
    bench.submit(ChangeAdapters(5, "a", "/a", True))
    bench.turn()
    assert "one must stay free" in told(bench, ChangeAdapters(6, "d", "/d", True))
    for handle, name in enumerate("abcbc", 1):
        bench.ask(handle, [1], max_new_tokens=2, adapter=name)
        bench.run()
    assert "a" in bench.executor.placed.values() and bench.executor.order.count("PlaceAdapter") == 5


def test_an_engine_without_adapters_refuses_them() -> None:
    bench = Bench()
    assert "--enable-lora" in told(bench, ChangeAdapters(1, "a", "/a"))
    bench.ask(1, [1], adapter="a")
    bench.run()
    refused = bench.out.ended[1]
    assert isinstance(refused, FinishAbort) and "start with --enable-lora" in refused.message
