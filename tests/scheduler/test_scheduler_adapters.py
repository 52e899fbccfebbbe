"""Adapters in the scheduler: slots, waiting for one, and what cannot be loaded or unloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bough.core.control import ADAPTER_FILES, CommandResult
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort, FinishLength
from bough.core.settings import LoraSettings
from bough.messages.requests import Abort, ChangeAdapters, GetState, Shutdown
from bough.scheduler.adapters import Adapters, find_below
from bough.scheduler.planner import SLOT_WAIT_S
from tests.fakes.executor import FakeExecutor, FakeTicket
from tests.fakes.scheduler_bench import Bench

NEVER = 1 << 30  # looks at a ticket that is not ready yet


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


@pytest.mark.parametrize(("policy", "placed"), [("lru", "abcb"), ("fifo", "abca")])
def test_which_adapter_leaves_its_slot(policy: str, placed: str) -> None:
    bench = bench_with("a", "b", "c", max_loras_per_batch=2, lora_eviction_policy=policy)
    before, stood = dict(bench.executor.placed), ""
    for handle, name in enumerate("abaca" if policy == "fifo" else "abacb", 1):
        bench.ask(handle, [handle, 2, 3], max_new_tokens=2, adapter=name)
        bench.run()
        if bench.executor.placed != before:
            before, stood = dict(bench.executor.placed), stood + name
    assert stood == placed


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


def test_the_models_own_names_are_not_an_adapters() -> None:
    adapters = Adapters(FakeExecutor(), LoraSettings(), ("base", "default"))
    for name in ("base", "default"):
        with pytest.raises(RequestError, match="means the model itself"):
            adapters.load(name, "/a")
    adapters.load("other", "/a")
    assert adapters.facts == {"loaded_adapters": {"other": "/a"}}


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


def test_adapters_of_waiting_requests_are_brought_to_slots_before_their_turn() -> None:
    bench = Bench(FakeExecutor(rows=1), lora=LoraSettings(max_loras_per_batch=3))
    for call, name in enumerate("abcd"):
        bench.submit(ChangeAdapters(call, name, f"/{name}"))
    for handle, name in enumerate(["a", "", "b", "c", "a", "d"], 1):
        bench.ask(handle, [handle, 2], max_new_tokens=12, adapter=name)
    bench.turn(6)
    placed = bench.executor.placed
    assert not bench.out.ended and set(placed.values()) == {"a", "b", "c"}
    assert bench.executor.order.count("PlaceAdapter") == 3  # the slot of an adapter that is waited for is not taken
    bench.run()
    assert {*bench.out.ended.values()} == {FinishLength(12)}
    assert bench.executor.order.count("PlaceAdapter") == 4 and "d" in placed.values()


def put_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ADAPTER_FILES:
        (folder / name).write_text(folder.name)
    return folder


def resolving(folder: Path, *names: str, **lora: Any) -> Bench:
    for name in names:
        put_adapter(folder / name)
    return Bench(lora=LoraSettings(lora_resolver=str(folder), **lora))


def refusal(bench: Bench, handle: int) -> FinishAbort:
    refused = bench.out.ended[handle]
    assert isinstance(refused, FinishAbort)
    return refused


def test_the_resolver_loads_an_adapter_once_and_holds_up_nobody_else(tmp_path: Path) -> None:
    bench = resolving(tmp_path, "team/a", "b")
    bench.executor.reading = FakeTicket(CommandResult(), NEVER)
    for handle in (1, 2):
        bench.ask(handle, [1, 2], max_new_tokens=3, adapter="team/a")
    bench.ask(3, [3, 4], max_new_tokens=3)
    bench.ask(4, [5, 6], max_new_tokens=3, adapter="b")
    bench.turn(12)
    bench.submit(GetState(9))
    bench.turn()
    assert bench.out.ended.keys() == {3} and bench.out.replies[-1].data["num_waiting_reqs"] == 3
    bench.executor.reading.looks = 0
    bench.run()
    assert {bench.out.ended[handle] for handle in (1, 2, 4)} == {FinishLength(3)}
    assert bench.executor.order.count("ReadAdapter") == bench.executor.order.count("LoadAdapter") == 2
    bench.submit(GetState(10))
    bench.turn()
    loaded = {"team/a": str(tmp_path / "team/a"), "b": str(tmp_path / "b")}
    assert bench.out.replies[-1].data["loaded_adapters"] == loaded
    bench.ask(5, [1, 2], max_new_tokens=3, adapter="team/a")
    bench.run()
    assert bench.executor.order.count("ReadAdapter") == 2 and bench.out.ended[5] == FinishLength(3)


def test_requests_that_wait_for_an_adapter_can_be_aborted(tmp_path: Path) -> None:
    bench = resolving(tmp_path, "a")
    bench.executor.reading = FakeTicket(CommandResult(), NEVER)
    for handle in (1, 2, 3):
        bench.ask(handle, [1, 2], max_new_tokens=3, adapter="a")
    bench.turn()
    bench.submit(Abort(2))
    bench.turn()
    assert bench.out.ended.keys() == {2} and refusal(bench, 2).status_code == 499
    bench.submit(Shutdown())
    bench.scheduler.run()
    assert bench.out.ended.keys() == {1, 2, 3} and refusal(bench, 1).status_code == 503


def test_a_command_that_loads_holds_up_nobody_either() -> None:
    bench = Bench(lora=LoraSettings())
    bench.executor.reading = FakeTicket(CommandResult(), NEVER)
    bench.submit(ChangeAdapters(1, "a", "/a"))
    bench.ask(1, [1, 2], max_new_tokens=3)
    bench.ask(2, [1, 2], max_new_tokens=3, adapter="a")
    bench.turn(8)
    assert bench.out.ended.keys() == {1} and not bench.out.replies
    assert "loaded already" in told(bench, ChangeAdapters(2, "a", "/other"))
    bench.executor.reading.looks = 0
    bench.run()
    assert bench.out.replies[-1].ok and bench.out.replies[-1].call == 1 and bench.out.ended[2] == FinishLength(3)


def test_what_the_resolver_finds_may_be_no_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bough.scheduler.adapters.find_below", lambda folder, name: "missing")
    bench = resolving(tmp_path)
    bench.ask(1, [1], adapter="a")
    bench.run()
    refused = refusal(bench, 1)
    assert (refused.status_code, refused.message, refused.field) == (400, "There is no such adapter.", "lora_path")


def test_an_idle_adapter_of_the_resolver_makes_room(tmp_path: Path) -> None:
    bench = resolving(tmp_path, "a", "b", "c", "d", max_loaded_loras=3)
    bench.submit(ChangeAdapters(1, "own", "/own"))
    for handle, name in enumerate("abac", 1):
        bench.ask(handle, [1, 2], max_new_tokens=2, adapter=name)
        bench.run()
        assert bench.out.ended[handle] == FinishLength(2)
    bench.submit(GetState(2))
    bench.turn()
    assert [*bench.out.replies[-1].data["loaded_adapters"]] == ["own", "a", "c"]
    for handle, name in ((5, "a"), (6, "c"), (7, "d")):
        bench.ask(handle, [1, 2], max_new_tokens=9, adapter=name)
    bench.run()
    assert "--max-loaded-loras" in refusal(bench, 7).message and bench.out.ended[6] == FinishLength(9)
    assert refusal(bench, 7).status_code == 503, "it may be tried again"


@pytest.mark.parametrize(
    "name",
    [
        "absent",
        "../a",
        "b/../../a",
        "..",
        ".",
        "./b",
        "b/",
        "b//",
        "/b",
        "half",
        "out",
        "file",
        "loop",
        "b\0",
        "x" * 999,
    ],
)
def test_names_and_links_do_not_lead_out_of_the_resolvers_folder(tmp_path: Path, name: str) -> None:
    folder, outside = tmp_path / "adapters", put_adapter(tmp_path / "a")
    put_adapter(folder / "b")
    put_adapter(folder)
    (put_adapter(folder / "half") / ADAPTER_FILES[1]).unlink()
    (folder / "out").symlink_to(outside)
    (put_adapter(folder / "file") / ADAPTER_FILES[1]).unlink()
    (folder / "file" / ADAPTER_FILES[1]).symlink_to(outside / ADAPTER_FILES[1])
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "inside").symlink_to(folder / "b")
    assert find_below(str(folder), "b") and find_below(str(folder), "inside")
    bench = resolving(folder)
    bench.ask(1, [1], adapter=name)
    bench.run()
    refused = refusal(bench, 1)
    assert refused.status_code == 404 and "inside --lora-resolver" in refused.message
    assert "ReadAdapter" not in bench.executor.order
