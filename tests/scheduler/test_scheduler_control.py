"""Commands for the executor: in order with the plans, and never while a request is computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.control import CopyPagesIn, CopyPagesOut, Sleep, SwapWeights, TakeTensors, Wake
from bough.core.finish import FinishAbort, FinishLength
from bough.messages.outputs import Open, Reply, StepOutput
from bough.messages.requests import (
    Abort,
    Control,
    FlushCache,
    GetState,
    Pause,
    PauseMode,
    Resume,
    StartProfile,
    StopProfile,
)
from tests.fakes.executor import FakeExecutor, oracle
from tests.fakes.scheduler_bench import Bench


def swap(call: int, path: str = "x", **options: bool) -> Control:
    facts = {"model_path": path, "weight_version": path}
    return Control(call=call, command=SwapWeights(path), facts=facts, **{"wait": True, "flush_cache": True, **options})


def release(call: int) -> Control:
    return Control(call=call, command=Sleep(), flush_cache=True)


def wake(call: int) -> Control:
    return Control(call=call, command=Wake())


def reply_to(bench: Bench, call: int) -> Reply | None:
    return next((reply for reply in bench.out.replies if reply.call == call), None)


@pytest.mark.parametrize("looks", [0, 5])
def test_a_swap_waits_for_the_requests_before_it_and_holds_those_behind_it(looks: int) -> None:
    bench = Bench()
    bench.executor.command_looks = looks
    bench.ask(1, [1, 2, 3], max_new_tokens=20)
    bench.turn(3)
    bench.submit(swap(7))
    bench.ask(2, [1, 2, 3], max_new_tokens=20)
    bench.turn(4)
    assert reply_to(bench, 7) is None and 2 not in bench.out.opened
    bench.submit(GetState(8))
    bench.turn()
    assert bench.out.replies[-1].data["num_waiting_reqs"] == 1
    bench.run()
    assert bench.out.outputs[1] == oracle([1, 2, 3], 20) and bench.out.outputs[2] == oracle([1, 2, 3], 20, weights="x")
    assert reply_to(bench, 7) == Reply(7, True, "done", {"num_paused_requests": 0})
    assert bench.out.started[2].cached_tokens == 0, "what the other weights have computed is forgotten"
    assert [bench.out.started[handle].weight_version for handle in (1, 2)] == ["default", "x"]
    bench.submit(GetState(9))
    bench.turn()
    assert bench.out.replies[-1].data["model_path"] == "x"


def test_the_cache_is_kept_where_that_is_asked_for() -> None:
    bench = Bench()
    bench.ask(1, [1, 2, 3, 4], max_new_tokens=1)
    bench.submit(swap(7, flush_cache=False))
    bench.ask(2, [1, 2, 3, 4], max_new_tokens=1)
    bench.run()
    assert bench.out.started[2].cached_tokens == 3


def test_a_swap_may_end_what_runs() -> None:
    bench = Bench()
    bench.ask(1, [1, 2, 3], max_new_tokens=50)
    bench.turn(3)
    bench.submit(swap(7, abort_all=True))
    bench.turn(2)
    assert isinstance(bench.out.ended[1], FinishAbort) and reply_to(bench, 7).ok  # type: ignore[union-attr]


def test_a_swap_that_fails_leaves_the_weights_and_the_cache() -> None:
    bench = Bench()
    bench.ask(1, [1, 2, 3], max_new_tokens=5)
    bench.submit(swap(7, "missing"))
    bench.ask(2, [1, 2, 3], max_new_tokens=5)
    bench.run()
    assert reply_to(bench, 7) == Reply(7, False, "There is no such model.", {"num_paused_requests": 0})
    assert bench.out.outputs[2] == bench.out.outputs[1] == oracle([1, 2, 3], 5)
    assert bench.out.started[2].cached_tokens == 2 and bench.out.started[2].weight_version == "default"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_paused_engine_swaps_at_once(mode: PauseMode) -> None:
    bench = Bench()
    bench.ask(1, [1, 2, 3], max_new_tokens=12)
    bench.turn(4)
    bench.submit(Pause(5, mode), swap(6), swap(7, flush_cache=False))
    bench.turn(2)
    # Requests that are paused in place read their pages again.
    assert [reply_to(bench, call).ok for call in (6, 7)] == [mode == "retract", True]  # type: ignore[union-attr]
    assert ('"flush_cache": false' in reply_to(bench, 6).message) == (mode == "in_place")  # type: ignore[union-attr]
    assert reply_to(bench, 7).data == {"num_paused_requests": 1}  # type: ignore[union-attr]
    told, pass_on = dict[int, tuple[int, str]](), bench.out.tokens

    def listen(message: Open | StepOutput) -> None:
        told.update(message.retractions if isinstance(message, StepOutput) else {})
        pass_on(message)

    bench.out.tokens = listen  # type: ignore[method-assign]
    bench.submit(Resume(8))
    bench.run()
    assert bench.out.ended[1] == FinishLength(12)
    assert told == {1: (int(mode == "retract"), "x")}, "other weights compute the rest"


def test_memory_is_released_only_while_nothing_runs() -> None:
    bench = Bench()
    bench.ask(1, [1, 2, 3], max_new_tokens=10)
    bench.turn(2)
    bench.submit(release(7))
    bench.turn()
    assert not reply_to(bench, 7).ok and "1 requests run or wait" in reply_to(bench, 7).message  # type: ignore
    bench.run()
    assert bench.out.outputs[1] == oracle([1, 2, 3], 10) and not bench.executor.asleep


def test_requests_to_a_released_engine_are_refused_and_later_ones_get_the_same_as_before() -> None:
    bench = Bench()
    bench.ask(1, [1, 2, 3], max_new_tokens=10)
    bench.run()
    bench.submit(release(7))
    bench.ask(2, [1, 2, 3], max_new_tokens=10)
    bench.submit(FlushCache(8), Pause(9, "retract"), Resume(10))
    bench.run()
    refused = bench.out.ended[2]
    assert isinstance(refused, FinishAbort) and refused.status_code == 503 and refused.message == "asleep"
    assert [reply_to(bench, call).ok for call in (7, 8, 9, 10)] == [True, True, True, False]  # type: ignore[union-attr]
    bench.submit(wake(11), Resume(12))
    bench.ask(3, [1, 2, 3], max_new_tokens=10)
    bench.run()
    assert bench.out.outputs[3] == oracle([1, 2, 3], 10) and bench.out.started[3].cached_tokens == 0


def test_weights_that_come_back_from_files_have_the_version_of_those() -> None:
    bench = Bench()

    def versions(*commands: Control) -> list[str]:
        found = []
        for number, command in enumerate(commands):
            bench.submit(command)
            handle = 10 * command.call + number
            bench.ask(handle, [1, 2, 3], max_new_tokens=1)
            bench.run()
            started = bench.out.started.get(handle)
            found.append("" if started is None else started.weight_version)
        return found

    def take(call: int, version: str) -> Control:
        facts = {"weight_version": version}
        return Control(call=call, command=TakeTensors((version,)), wait=True, flush_cache=True, facts=facts)

    assert versions(take(1, "a"), release(2), wake(3)) == ["a", "", "default"]
    assert versions(swap(4, "b"), release(5), wake(6)) == ["b", "", "b"]
    assert versions(take(7, "c"), wake(8), release(9), wake(10)) == ["c", "c", "", "b"]


def test_requests_behind_a_command_can_be_aborted() -> None:
    bench = Bench()
    bench.executor.command_looks = 50
    bench.submit(swap(7))
    for handle in (1, 2, 3):
        bench.ask(handle, [handle], max_new_tokens=3, rid=f"r{handle}")
    bench.turn(2)
    bench.submit(Abort(1), Abort(name="r2"), Abort(name="nobody"))
    bench.turn()
    assert bench.out.ended.keys() == {1, 2} and not bench.out.outputs[1]
    bench.run()
    assert bench.out.outputs[3] == oracle([3], 3, weights="x")


def test_who_waits_behind_a_command_is_told_of_the_end() -> None:
    bench = Bench()
    bench.executor.command_looks = 1000
    bench.submit(swap(7))
    bench.ask(1, [1], max_new_tokens=3)
    bench.turn(2)
    bench.scheduler._closing = True
    bench.scheduler.run()
    assert bench.out.ended[1].status_code == 503  # type: ignore[union-attr]


def test_profiles_and_commands_keep_their_order() -> None:
    bench = Bench()
    bench.executor.command_looks = 3
    bench.submit(StartProfile(1), swap(2), StopProfile(3), swap(4, "yy"))
    bench.run()
    assert bench.executor.order == ["ProfileStart", "SwapWeights", "ProfileStop", "SwapWeights"]
    assert [reply.call for reply in bench.out.replies] == [1, 2, 3, 4] and bench.executor.weights == "yy"


def test_pages_that_are_copied_out_and_in_hold_what_they_held() -> None:
    executor = FakeExecutor(page_size=4, pages=16)
    bench = Bench(executor)
    bench.ask(1, list(range(10)), max_new_tokens=3)
    bench.run()
    pages, elsewhere = np.array([1, 2, 3], dtype=np.int32), np.array([9, 12, 10], dtype=np.int32)
    buffer = np.zeros((3, executor.limits().page_bytes[0]), dtype=np.uint8)
    executor.control(CopyPagesOut(pages, buffer)).wait()
    executor.control(CopyPagesIn(elsewhere, buffer)).wait()
    held = executor.slots.reshape(-1, 4)
    assert (held[pages] == held[elsewhere]).all() and held[9].tolist() == [0, 1, 2, 3]


ASK = st.tuples(st.just("ask"), st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(0, 12))
COMMAND = st.tuples(st.sampled_from(["swap", "keep", "missing", "release", "wake", "abort"]), st.integers(0, 9))
TURN = st.tuples(st.just("turn"), st.integers(1, 6))
MACHINE = st.tuples(st.sampled_from([1, 4]), st.integers(24, 60), st.integers(1, 5), st.integers(4, 20))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(ASK, ASK, ASK, COMMAND, TURN), max_size=40), MACHINE, st.booleans(), st.integers(0, 4))
def test_every_request_is_computed_on_one_side_of_every_command(
    actions: list,
    machine: tuple,
    overlap: bool,
    looks: int,  # type: ignore[type-arg]
) -> None:
    page_size, tokens, rows, chunk = machine
    executor = FakeExecutor(
        rows=rows, pages=tokens // page_size, page_size=page_size, chunk_tokens=max(chunk, page_size), context_length=48
    )
    executor.command_looks = looks
    bench = Bench(executor, disable_overlap_schedule=not overlap)
    asked: dict[int, tuple[list[int], int, str]] = {}
    weights, call = "", 1000
    for action in actions:
        call += 1
        match action:
            case ("ask", prompt, max_new):
                asked[len(asked)] = (prompt, max_new, weights)
                bench.ask(len(asked) - 1, prompt, max_new_tokens=max_new)
            case ("swap" | "keep", size):
                weights = size * "w"
                # Without a flush, requests behind the swap would read what other weights have written, which the
                # fake's tokens do not show: pages hold the tokens themselves.
                bench.submit(swap(call, weights, flush_cache=action[0] == "swap"))
            case ("missing", _):
                bench.submit(swap(call, "missing"))
            case ("release", _):
                bench.submit(release(call))
            case ("wake", _):
                bench.submit(wake(call))
            case ("abort", handle):
                bench.submit(Abort(handle))
            case ("turn", times):
                bench.turn(times)
    bench.run()
    assert bench.out.ended.keys() == asked.keys()
    for handle, (prompt, max_new, wanted) in asked.items():
        output, reason = bench.out.outputs[handle], bench.out.ended[handle]
        expected = oracle(prompt, max_new, weights=wanted)
        if isinstance(reason, FinishAbort):
            assert output == expected[: len(output)] and (reason.status_code in (499, 503))
        else:
            assert output == expected[: min(max_new, min(48, tokens // page_size * page_size) - len(prompt))]
    commands = [action for action in actions if action[0] not in ("ask", "turn", "abort")]
    assert len(bench.out.replies) == len(commands), "every command is answered, once"
    assert [reply.call for reply in bench.out.replies] == sorted(reply.call for reply in bench.out.replies)
