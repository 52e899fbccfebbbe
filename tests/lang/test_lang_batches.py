"""Batches: results in order, a common beginning computed once, runs ordered by what they share."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import bough as sgl
from bough.core.errors import RequestError
from bough.lang.backends.base import GenRequest
from tests.fakes.lang_backend import ScriptedBackend

SHOTS = "Q: How many legs has a spider? A: eight. Q: How many has a cat? A: four.\n"


@sgl.function
def few_shot(s: Any, topic: str, question: str) -> None:
    s += SHOTS
    s += f"Topic: {topic}. Q: {question} A:"
    s += sgl.gen("answer", stop="\n")


ITEMS = [{"topic": topic, "question": f"q{i}"} for i in range(3) for topic in ("b", "a")]


def test_results_come_in_the_order_of_the_arguments() -> None:
    backend = ScriptedBackend(lambda request: request.text[-6:])
    states = few_shot.run_batch(ITEMS, backend=backend, max_new_tokens=5, progress_bar=True)
    assert [state["answer"] for state in states] == [f": q{i} A:"[-6:] for i in range(3) for _ in "ab"]
    assert states.errors == {} and backend.requests[0].sampling["max_new_tokens"] == 5
    turns = few_shot.run_batch(ITEMS, backend=backend, generator_style=True, num_threads=1)
    assert [state.text() for state in turns] == [state.text() for state in states]
    assert few_shot.run_batch([], backend=backend) == []


def test_what_all_share_is_cached_first_and_runs_stand_by_their_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend()
    few_shot.run_batch(ITEMS, backend=backend, num_threads=1)
    assert backend.cached == [f"{SHOTS}Topic: "]
    assert [request.text for request in backend.requests] == sorted(request.text for request in backend.requests)
    same = ScriptedBackend()
    few_shot.run_batch([{"topic": "cats", "question": q} for q in "ab"], backend=same)
    assert same.cached == [f"{SHOTS}Topic: cats. Q: "]  # an argument that is the same for all is constant
    bound = ScriptedBackend()
    few_shot.bind(topic="dogs").run_batch([("a",), ("b",)], backend=bound)
    assert bound.cached == [f"{SHOTS}Topic: dogs. Q: "]
    for items in ([ITEMS[0]], []):
        few_shot.run_batch(items, backend=bound)
    assert len(bound.cached) == 1
    monkeypatch.setattr(sgl.global_config, "enable_precache_with_tracing", False)
    few_shot.run_batch(ITEMS, backend=bound)
    assert len(bound.cached) == 1


def test_a_short_beginning_is_not_worth_a_call() -> None:
    @sgl.function
    def short(s: Any, x: str) -> None:
        s += "Q: " + x + sgl.gen("a")

    backend = ScriptedBackend()
    short.run_batch([("a",), ("b",)], backend=backend)
    assert backend.cached == []
    assert short.cache(backend) == "Q: " and backend.cached == ["Q: "]


def test_a_beginning_that_cannot_be_cached_leaves_the_runs_to_say_why() -> None:
    class Uncached(ScriptedBackend):
        async def async_cache_prefix(self, text: str) -> None:
            raise RequestError("too long")

    def refuse_a(request: GenRequest) -> str:
        if "Topic: a" in request.text:
            raise RequestError("too long")
        return "x"

    states = few_shot.run_batch(ITEMS, backend=Uncached(refuse_a))
    assert sorted(states.errors) == [1, 3, 5] and [states[i]["answer"] for i in (0, 2, 4)] == ["x"] * 3


def test_leaving_a_batch_early_aborts_the_rest() -> None:
    backend = ScriptedBackend(gate=threading.Event())  # answers nobody

    @sgl.function
    def late(s: Any, i: int) -> None:
        s += f"{i}" + (sgl.gen("x") if i else "")

    turns = late.run_batch([(i,) for i in range(60)], backend=backend, generator_style=True, num_threads=1)
    assert next(turns).text() == "0"
    turns.close()
    while backend.open:
        threading.Event().wait(0.001)
    assert backend.cancelled == len(backend.requests) <= 1


def test_arguments_that_do_not_fit_are_refused() -> None:
    backend = ScriptedBackend()
    with pytest.raises(TypeError, match="takes 2 arguments, got 3"):
        few_shot.run_batch([("a", "b", "c")], backend=backend)
    with pytest.raises(ValueError, match="num_threads"):
        few_shot.run_batch(ITEMS, backend=backend, num_threads=0)
    states = few_shot.run_batch([{"topic": "a"}], backend=backend)
    assert "missing 1 required positional argument: 'question'" in str(states.errors[0])
