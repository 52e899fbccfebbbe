"""Nobody waits for what cannot come: other threads of a program, scopes that are open or were left, lost branches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import bough as sgl
from bough.core.errors import EngineDeadError
from bough.lang.backends.base import GenRequest
from tests.fakes.lang_backend import ScriptedBackend
from tests.fakes.lang_graph import nodes_of

SOON_S = 20.0


def dead(request: GenRequest) -> str:
    raise EngineDeadError("the engine is gone")


def in_time(work: Callable[[], Any]) -> Any:
    """What it gives; fails if it waits for ever."""
    results: list[Any] = []
    threading.Thread(target=lambda: results.append(work()), daemon=True).start()
    limit = threading.Event()
    for _ in range(int(SOON_S * 200)):
        if results:
            return results[0]
        limit.wait(0.005)
    raise AssertionError("it waits for ever")


@pytest.mark.parametrize(
    "read",
    [
        lambda branch: branch.text(),
        lambda branch: branch.sync(),
        lambda branch: branch.messages(),
        lambda branch: branch.error(),
        lambda branch: "".join(branch.text_iter()),
        lambda branch: "".join(branch.text_iter("x")),
    ],
    ids=["text", "sync", "messages", "error", "text_iter", "text_iter of a variable"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_other_threads_of_a_program_may_read_its_branches(read: Callable[[Any], Any], stream: bool) -> None:
    @sgl.function
    def program(s: Any) -> list[Any]:
        s += "a"
        branches = s.fork(3)
        branches += sgl.gen("x")
        with ThreadPoolExecutor() as pool:
            return list(pool.map(read, branches))

    def work() -> Any:
        state = program.run(backend=ScriptedBackend(), stream=stream)
        state.sync()
        return state.ret_value

    expected = in_time(work)
    assert expected == [read_value(read)] * 3


def read_value(read: Callable[[Any], Any]) -> Any:
    """What a reader gives in the body's own thread."""

    @sgl.function
    def program(s: Any) -> Any:
        s += "a"
        (branch,) = s.fork()
        branch += sgl.gen("x")
        return read(branch)

    return program.run(backend=ScriptedBackend()).ret_value


def test_branches_made_in_other_threads_are_read_by_the_body() -> None:
    @sgl.function
    def program(s: Any) -> list[str]:
        s += "a"

        def explore(i: int) -> Any:
            with s.copy() as branch:
                branch += sgl.gen("x")
                return branch, s.text()

        with ThreadPoolExecutor() as pool:
            explored = list(pool.map(explore, range(3)))
        return [branch.text() + text for branch, text in explored]

    assert in_time(lambda: program.run(backend=ScriptedBackend()).ret_value) == ["axa"] * 3


def test_a_scope_is_no_variable_before_it_is_closed() -> None:
    @sgl.function
    def program(s: Any) -> list[bool]:
        with s.var_scope("x"):
            s += "abc"
            seen = ["x" in s]
            for state in (s, s.fork()[0]):
                with pytest.raises(KeyError, match="no variable 'x'"):
                    _ = state["x"]
        return [*seen, "x" in s]

    state = in_time(lambda: program.run(backend=ScriptedBackend()))
    assert state.ret_value == [False, True] and state["x"] == "abc"


def test_scopes_and_messages_are_closed_when_a_program_catches_what_was_raised_inside() -> None:
    @sgl.function
    def program(s: Any) -> None:
        try:
            with s.user(), s.var_scope("x"):
                s += "abc"
                raise ValueError
        except ValueError:
            pass
        s["seen"] = s["x"]
        s += sgl.user("again")

    state = in_time(lambda: program.run(backend=ScriptedBackend()))
    assert (state["x"], state["seen"]) == ("abc", "abc")
    assert [message["content"] for message in state.messages()] == ["abc", "again"]
    kinds = [item.kind for item in nodes_of(program.trace().lane)]
    assert kinds[:5] == ["begin", "scope", "text", "scope end", "end"]


@sgl.function
def lost(s: Any, read: Callable[[Any], Any]) -> None:
    s += "a"
    branches = s.fork(2)
    branches += sgl.gen("x")
    try:
        read(branches)
    except sgl.ProgramError:
        s["caught"] = True


def test_a_failed_branch_that_nobody_reads_fails_the_run() -> None:
    with pytest.raises(sgl.ProgramError, match=r"test_lang_waiting.py:\d+ in lost: EngineDeadError") as caught:
        lost.run(lambda branches: None, backend=ScriptedBackend(dead))
    assert caught.value.text == "a"
    with pytest.raises(sgl.ProgramError, match="EngineDeadError"):  # one that was read does not stand for the other
        lost.run(lambda branches: branches[0].error(), backend=ScriptedBackend(dead))
    deep = lost.run_batch(
        [{"read": lambda branches: [b.fork()[0].fork(2) for b in branches]}], backend=ScriptedBackend(dead)
    )
    assert list(deep.errors) == [0]


def test_who_follows_a_stream_hears_of_a_branch_that_fails_behind_the_programs_last_line() -> None:
    gate = threading.Event()

    @sgl.function
    def forgetful(s: Any) -> None:
        (branch,) = s.fork()
        branch += "a" + sgl.gen("x", n=2)  # which is not streamed, and waits at the gate

    state = forgetful.run(backend=ScriptedBackend(dead, gate=gate), stream=True)
    threading.Timer(0.05, gate.set).start()
    assert "EngineDeadError" in str(state.error())


def test_branches_of_branches_are_heard_of_too() -> None:
    def refuse(request: GenRequest) -> str:
        return dead(request) if request.text.endswith("bad") else "x"

    @sgl.function
    def deep(s: Any) -> None:
        (branch,) = s.fork()
        (leaf,) = branch.fork()
        leaf += "bad" + sgl.gen("x")
        branch += "good" + sgl.gen("x")
        assert branch["x"] == "x"

    with pytest.raises(sgl.ProgramError, match="EngineDeadError"):
        deep.run(backend=ScriptedBackend(refuse))


@pytest.mark.parametrize(
    "read",
    [
        lambda branches: branches.join(),
        lambda branches: [branch.error() for branch in branches],
        lambda branches: [branch.cancel() for branch in branches],
    ],
    ids=["join", "error", "cancel"],
)
def test_a_failed_branch_that_the_program_has_dealt_with_stays_so(read: Callable[[Any], Any]) -> None:
    assert lost.run(read, backend=ScriptedBackend(dead)).error() is None


def test_a_failed_branch_whose_variables_were_asked_for_is_dealt_with() -> None:
    @sgl.function
    def careful(s: Any) -> int:
        branches = s.fork(2)
        branches += "a" + sgl.gen("x")
        caught = 0
        for branch in branches:
            try:
                _ = branch["x"]
            except sgl.ProgramError:
                caught += 1
        return caught

    assert careful.run(backend=ScriptedBackend(dead)).ret_value == 2


def test_joined_texts_are_those_of_the_branches_whatever_the_parent_wrote_meanwhile() -> None:
    @sgl.function
    def both(s: Any) -> None:
        s += "base|"
        branches = s.fork(2)
        branches += ["one", "two"]
        s += "more|"
        branches.join("concate_and_append")

    assert both.run(backend=ScriptedBackend()).text() == "base|more|onetwo"
