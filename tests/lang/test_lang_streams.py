"""Streams and event loops: pieces come as they are made, and async readers see what threads see."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

import bough as sgl
from bough.core.errors import RequestError
from bough.lang.backends.base import GenRequest
from tests.fakes.lang_backend import ScriptedBackend


@sgl.function
def story(s: Any, start: str = "Once ") -> str:
    s += start
    s += sgl.gen("first") + " and "
    s += sgl.gen("second")
    return "told"


def script(request: GenRequest) -> str:
    return "abc" if request.text == "Once " else "defg"


def test_the_whole_text_and_single_variables_can_be_followed() -> None:
    backend = ScriptedBackend(script)
    state = story.run(backend=backend, stream=True)
    assert list(state.text_iter("second"))[-1].endswith("g") and state["first"] == "abc"
    assert "".join(story.run(backend=backend, stream=True).text_iter()) == "Once abc and defg"
    assert "".join(story.run(backend=backend, stream=True).text_iter("first")) == "abc"
    state = story.run(backend=backend, stream=True)
    assert state.text() == "Once abc and defg" and state.ret_value == "told"


def test_without_a_stream_the_text_is_one_piece() -> None:
    state = story.run(backend=ScriptedBackend(script))
    assert list(state.text_iter()) == ["Once abc and defg"] and list(state.text_iter("first")) == ["abc"]


def test_a_program_can_follow_its_own_stream() -> None:
    @sgl.function
    def watcher(s: Any) -> None:
        s += "Once " + sgl.gen("x")
        s["pieces"] = "|".join(s.text_iter("x"))
        s["all"] = "".join(s.text_iter())

    state = watcher.run(backend=ScriptedBackend(script), stream=True)
    assert state["pieces"].replace("|", "") == "abc" and state["all"] == "Once abc"


def test_pieces_for_event_loops_with_meta_data() -> None:
    async def go() -> tuple[str, list[Any]]:
        backend = ScriptedBackend(script)
        state = story.run(backend=backend, stream=True)
        text = "".join([piece async for piece in state.text_async_iter()])
        state = story.run(backend=backend, stream=True)
        return text, [pair async for pair in state.text_async_iter("second", return_meta_data=True)]

    text, pairs = asyncio.run(go())
    assert text == "Once abc and defg"
    assert "".join(piece for piece, _ in pairs) == "defg" and pairs[-1][1]["completion_tokens"] == 4


def test_a_stream_that_fails_says_so_to_its_reader() -> None:
    def fail(request: GenRequest) -> str:
        if request.text == "Once ":
            return "abc"
        raise RequestError("no more")

    state = story.run(backend=ScriptedBackend(fail), stream=True)
    pieces = []
    with pytest.raises(sgl.ProgramError, match="no more"):
        for piece in state.text_iter():
            pieces.append(piece)
    assert "".join(pieces) == "Once abc and " and "no more" in str(state.error())
    with pytest.raises(KeyError, match="no variable 'third'"):
        list(story.run(backend=ScriptedBackend(script), stream=True).text_iter("third"))


def test_programs_for_event_loops() -> None:
    async def go() -> None:
        backend = ScriptedBackend(script)
        state = await story.async_run("Once ", backend=backend)
        assert state.ret_value == "told" and await state.async_get_var("second") == "defg"
        states = await asyncio.gather(*(story.async_run(backend=backend) for _ in range(20)))
        assert {state.text() for state in states} == {"Once abc and defg"}
        streamed = await story.async_run(backend=backend, stream=True)
        assert await streamed.async_get_var("first") == "abc"
        await streamed.async_sync()
        assert streamed.text() == "Once abc and defg"
        batch = await story.async_run_batch([{}, {"start": "Twice "}], backend=backend)
        assert [state["first"] for state in batch] == ["abc", "defg"]
        turns = [s.text() async for s in story.async_iter_batch([{}] * 3, backend=backend, num_threads=2)]
        assert turns == ["Once abc and defg"] * 3
        with pytest.raises(TypeError, match="no argument 'nonsense'"):
            await story.async_run_batch([{}], nonsense=1)

    asyncio.run(go())


def test_cancelling_the_task_aborts_the_program() -> None:
    backend = ScriptedBackend(gate=threading.Event())

    async def go() -> None:
        task = asyncio.create_task(story.async_run(backend=backend))
        batch = asyncio.create_task(story.async_run_batch([{}] * 3, backend=backend))
        while backend.open < 4:
            await asyncio.sleep(0.001)
        task.cancel()
        batch.cancel()
        await asyncio.gather(task, batch, return_exceptions=True)
        assert task.cancelled() and batch.cancelled()
        while backend.open:
            await asyncio.sleep(0.001)

    asyncio.run(go())
    assert backend.cancelled == 4


def test_an_error_reaches_the_awaiting_task() -> None:
    def fail(request: GenRequest) -> str:
        raise RequestError("no more")

    with pytest.raises(sgl.ProgramError, match="no more"):
        asyncio.run(story.async_run(backend=ScriptedBackend(fail)))
