"""What goes wrong is told: which program, which line, what was written; nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import bough as sgl
from bough.core.errors import EngineDeadError, RequestError
from bough.lang import running
from bough.lang.backends.base import GenRequest
from tests.fakes.lang_backend import ScriptedBackend


def dead(request: GenRequest) -> str:
    raise EngineDeadError("the engine is gone")


def test_an_error_of_the_back_end_surfaces_in_run() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "one two "
        s += sgl.gen("x")
        s += "three"

    with pytest.raises(sgl.ProgramError) as caught:
        program.run(backend=ScriptedBackend(dead))
    line = program.func.__code__.co_firstlineno + 3
    assert str(caught.value) == (
        f"Program 'program' failed at test_lang_failures.py:{line} in program: EngineDeadError: the engine is gone\n"
        "Text so far: 'one two '"
    )
    assert (caught.value.program, caught.value.text) == ("program", "one two ")
    assert isinstance(caught.value.__cause__, EngineDeadError)


def test_an_error_in_the_body_names_its_line_and_aborts_what_runs() -> None:
    backend = ScriptedBackend(gate=threading.Event())

    @sgl.function
    def broken(s: Any) -> None:
        s += "a" + sgl.gen("x")
        while not backend.open:
            threading.Event().wait(0.001)
        raise ValueError("mine")

    with pytest.raises(
        sgl.ProgramError, match=r"'broken' failed at test_lang_failures.py:\d+ in broken: ValueError: mine"
    ):
        broken.run(backend=backend)
    while backend.open:
        threading.Event().wait(0.001)
    assert backend.cancelled == 1


def test_an_unknown_variable_is_named_with_those_there_are() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x")
        _ = s["y"]

    with pytest.raises(sgl.ProgramError, match=r"no variable 'y'; there are: 'x'"):
        program.run(backend=ScriptedBackend())


def test_long_texts_are_cut_in_the_message_but_kept_in_the_error() -> None:
    @sgl.function
    def long(s: Any) -> None:
        s += "a" * 5000 + sgl.gen("x")

    with pytest.raises(sgl.ProgramError) as caught:
        long.run(backend=ScriptedBackend(dead))
    assert len(caught.value.text) == 5000 and len(str(caught.value)) < 700


def expire_when(ready: Callable[[], bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's time limit is over when `ready`, however slow the machine is."""

    async def sleep(_seconds: float) -> None:
        while not ready():
            await asyncio.sleep(0.001)

    monkeypatch.setattr(running, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))


def test_a_time_out_aborts_the_request_and_the_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(gate=threading.Event())
    expire_when(lambda: len(backend.requests) == 4, monkeypatch)

    @sgl.function
    def slow(s: Any) -> None:
        branches = s.fork(3)
        branches += "a" + sgl.gen("x")
        s += "b" + sgl.gen("y")
        branches.join()

    with pytest.raises(sgl.ProgramError, match=r"TimeoutError: the program took longer than 0.05 s") as caught:
        slow.run(backend=backend, timeout_s=0.05)
    line = slow.func.__code__.co_firstlineno + 4
    assert caught.value.line == f"test_lang_failures.py:{line} in slow"  # what was being waited for
    while backend.open:
        threading.Event().wait(0.001)
    assert backend.cancelled == 4


def test_a_stream_can_be_cancelled() -> None:
    backend = ScriptedBackend(gate=threading.Event())

    @sgl.function
    def slow(s: Any) -> None:
        s += "a" + sgl.gen("x", n=2)
        _ = s["x"]

    state = slow.run(backend=backend, stream=True)
    while not backend.open:
        threading.Event().wait(0.001)
    state.cancel()
    with pytest.raises(sgl.ProgramError, match="cancelled"):
        _ = state["x"]
    assert state.error() is not None


def test_a_time_out_names_the_line_of_the_branch_that_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(gate=threading.Event())
    expire_when(lambda: len(backend.requests) == 1, monkeypatch)

    @sgl.function
    def slow(s: Any) -> None:
        (branch,) = s.fork()
        branch += "a" + sgl.gen("x")
        branch.sync()

    with pytest.raises(sgl.ProgramError, match="TimeoutError") as caught:
        slow.run(backend=backend, timeout_s=0.05)
    assert caught.value.line == f"test_lang_failures.py:{slow.func.__code__.co_firstlineno + 3} in slow"


def test_a_time_out_names_the_line_of_a_body_that_is_busy_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = threading.Event()
    expire_when(entered.is_set, monkeypatch)

    @sgl.function
    def busy(s: Any) -> None:
        entered.set()
        while True:
            threading.Event().wait(0.001)
            if s.error() is not None:
                return

    with pytest.raises(sgl.ProgramError, match="TimeoutError") as caught:
        busy.run(backend=ScriptedBackend(), timeout_s=0.05)
    assert caught.value.line.endswith(" in busy")


def test_what_is_finished_cannot_be_cancelled() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x")
        branches = s.fork(2)
        branches += sgl.gen("y")

    state = program.run(backend=ScriptedBackend())
    state.cancel()
    assert state.error() is None and state.text() == "ax"


def test_a_back_end_whose_call_is_cancelled_from_below_is_an_error() -> None:
    def vanish(request: GenRequest) -> str:
        raise asyncio.CancelledError

    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x")

    with pytest.raises(sgl.ProgramError, match="went away"):
        program.run(backend=ScriptedBackend(vanish))


def test_defects_of_a_back_end_surface_too() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "a" + sgl.gen("x")

    with pytest.raises(sgl.ProgramError, match="ZeroDivisionError"):
        program.run(backend=ScriptedBackend(lambda request: str(1 // 0)))


def test_a_program_inside_a_program_is_named_by_its_line() -> None:
    @sgl.function
    def inner(s: Any) -> None:
        s += sgl.gen("x")

    @sgl.function
    def outer(s: Any) -> None:
        inner(s)

    with pytest.raises(sgl.ProgramError, match=r"'outer' failed at test_lang_failures.py:\d+ in inner"):
        outer.run(backend=ScriptedBackend(dead))


def test_a_failing_item_of_a_batch_keeps_the_others() -> None:
    def script(request: GenRequest) -> str:
        if "3" in request.text:
            raise RequestError("no threes")
        return request.text

    @sgl.function
    def item(s: Any, i: int) -> int:
        s += f"{i}" + sgl.gen("x")
        if i == 5:
            raise ValueError("five")
        return i

    states = item.run_batch([{"i": i} for i in range(8)], backend=ScriptedBackend(script), num_threads=3)
    assert sorted(states.errors) == [3, 5]
    assert "no threes" in str(states.errors[3]) and "ValueError: five" in str(states.errors[5])
    assert states.errors[5].state is states[5]
    assert [state["x"] for i, state in enumerate(states) if i not in (3, 5)] == ["0", "1", "2", "4", "6", "7"]
    with pytest.raises(sgl.ProgramError, match="no threes"):
        _ = states[3]["x"]
