"""What tracing must not do: call a model, go on for ever, take a default for a constant, or outlast its batch."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

import bough as sgl
from bough.lang import running
from tests.fakes.lang_backend import ScriptedBackend
from tests.fakes.lang_graph import nodes_of

LONG = "Answer in the style that is asked for, in one word, and be honest about what you do not know. "


@sgl.function
def summarize(s: Any, doc: str) -> None:
    s += f"Summarise: {doc}\n" + sgl.gen("summary")


@sgl.function
def styled(s: Any, question: str, style: str = "formal") -> None:
    s += f"{LONG}Style: {style}. Q: {question}"
    s += sgl.gen("answer")


class Stuck(ScriptedBackend):
    """Never has a prefix."""

    waits = 0

    async def async_cache_prefix(self, text: str) -> None:
        self.waits += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.waits -= 1


def test_a_traced_program_runs_no_other() -> None:
    backend = ScriptedBackend()

    @sgl.function
    def outer(s: Any, doc: str) -> None:
        summary = summarize.run(doc, backend=backend)["summary"]
        s += "S: " + summary + sgl.gen("x")

    @sgl.function
    def many(s: Any, doc: str) -> None:
        s += "a"
        summarize.run_batch([(doc,), (doc,)], backend=backend)

    @sgl.function
    def caching(s: Any) -> None:
        summarize.cache(backend=backend)

    assert outer.trace().stopped == "runs program 'summarize'"
    assert many.trace().pretty().endswith("  text     'a'\n  … runs program 'summarize'")
    assert caching.trace().stopped == "caches program 'summarize'"
    assert backend.requests == []
    outer.run_batch([("d1",), ("d2",)], backend=backend)
    assert len(backend.requests) == 4 and not any("\x02" in request.text for request in backend.requests)


def test_a_program_that_tries_again_for_ever_is_left() -> None:
    @sgl.function
    def retry(s: Any) -> None:
        while True:
            s += sgl.gen("j")
            try:
                json.loads(s["j"])
                break
            except TypeError:
                continue

    @sgl.function
    def repair(s: Any, payload: str) -> None:
        while True:
            try:
                json.loads(payload)
                break
            except (TypeError, ValueError):
                payload = "{}" if isinstance(payload, str) else payload
        s += payload + sgl.gen("x")

    graph = retry.trace()
    assert graph.stopped == "stopped after 200,000 lines" and next(nodes_of(graph.lane)).kind == "gen"
    states = repair.run_batch([("{}",), ("{",)], backend=ScriptedBackend())
    assert [state.text() for state in states] == ["{}x", "{}x"]


def test_a_state_may_stand_in_a_with_block() -> None:
    @sgl.function
    def program(s: Any) -> None:
        with s:
            s += "a" + sgl.gen("x")

    assert program.trace().stopped is None


def test_an_argument_is_constant_only_if_it_is_the_same_for_all() -> None:
    backend = ScriptedBackend()
    items = [{"question": "1", "style": "plain"}, {"question": "2"}, {"question": "3", "style": "plain"}]
    styled.run_batch(items, backend=backend, num_threads=1)
    assert backend.cached == [f"{LONG}Style: "]
    assert [request.text[-4:] for request in backend.requests] == ["Q: 2", "Q: 1", "Q: 3"]  # by style, then question
    backend.cached.clear()
    styled.run_batch([{"question": "1", "style": "formal"}, {"question": "2"}], backend=backend)
    assert backend.cached == [f"{LONG}Style: formal. Q: "]  # the default, given or not
    backend.cached.clear()
    styled.bind(style="bound").run_batch([{"question": "1", "style": "own"}, {"question": "2"}], backend=backend)
    assert backend.cached == [f"{LONG}Style: "]


def test_a_batchs_time_out_covers_its_caching(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = SimpleNamespace(**{**vars(asyncio), "sleep": lambda _seconds: asyncio.Event().wait()})
    monkeypatch.setattr(running, "asyncio", endless)  # the programs' own limits are another matter
    backend = Stuck()
    states = styled.run_batch([("1",), ("2",)], backend=backend, timeout_s=0.2)
    assert states.errors == {} and len(backend.requests) == 2 and backend.waits == 0


def test_a_back_end_that_cannot_cache_does_not_end_the_batch() -> None:
    class Broken(ScriptedBackend):
        async def async_cache_prefix(self, text: str) -> None:
            raise ZeroDivisionError

    assert styled.run_batch([("1",), ("2",)], backend=Broken()).errors == {}


@pytest.mark.parametrize("iterate", [False, True])
def test_an_async_batch_that_is_cancelled_while_it_caches_starts_nothing(iterate: bool) -> None:
    backend = Stuck()

    async def work() -> None:
        if iterate:
            async for _ in styled.async_iter_batch([("1",), ("2",)], backend=backend):
                pass
        else:
            await styled.async_run_batch([("1",), ("2",)], backend=backend)

    async def leave() -> None:
        task = asyncio.create_task(work())
        while not backend.waits:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while backend.waits:
            await asyncio.sleep(0.001)

    asyncio.run(leave())
    assert backend.requests == []
