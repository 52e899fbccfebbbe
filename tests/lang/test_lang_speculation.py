"""API speculative execution: one call for a message of several generations."""

from __future__ import annotations

from typing import Any

import pytest

import bough as sgl
from bough.lang.expressions import Gen, Text
from bough.lang.writer import match
from tests.fakes.lang_backend import ScriptedBackend

FORM = [Text("Name:"), Gen("name", {"stop": "\n"}), Text("\nAge:"), Gen("age", {})]


@pytest.mark.parametrize(
    ("written", "found"),
    [
        ("Name: Ada\nAge: 36", [" Ada", " 36"]),
        ("Name:Ada\nAge:", ["Ada", ""]),
        ("\n Name: Ada\nAge: 36", [" Ada", " 36"]),
        ("The name: Ada", None),
        ("Name: Ada, 36", None),
        ("Name: Ada\nJob: x\nAge: 36", None),  # the stop comes first, and the program's text is not there
    ],
)
def test_the_programs_text_is_found_in_what_the_model_wrote(written: str, found: list[str] | None) -> None:
    texts = match(FORM, written)
    assert (None if texts is None else texts[1::2]) == found


def test_two_generations_in_a_row_need_a_stop_between_them() -> None:
    assert match([Gen("a", {}), Gen("b", {})], "xy") is None
    assert match([Gen("a", {"stop": [";", "."]}), Gen("b", {})], "x.y") == ["x", ".y"]


def test_a_typed_generation_must_be_of_its_type() -> None:
    typed: list[Any] = [Text("Age: "), sgl.gen_int("age"), Text(" years")]
    assert match(typed, "Age: 36 years") == ["Age: ", "36", " years"]
    assert match(typed, "Age: many years") is None


def test_a_constraint_of_one_part_is_not_sent_for_the_whole_message() -> None:
    @sgl.function(num_api_spec_tokens=8)
    def typed(s: Any, expr: Any) -> None:
        s += sgl.user("Who?") + sgl.assistant(expr + " years, " + sgl.gen("name"))

    answers = iter(["many years, Ada", "36 years, Ada"])
    backend = ScriptedBackend(lambda request: next(answers), chat_only=True)
    assert typed.run(sgl.gen_int("age"), backend=backend)["age"] == "36"
    assert not any("regex" in request.sampling for request in backend.requests)
    with pytest.raises(sgl.ProgramError, match="takes no json_schema; give that gen"):
        typed.run(sgl.gen("age", json_schema={"type": "integer"}), backend=backend)


@sgl.function(num_api_spec_tokens=64)
def form(s: Any) -> None:
    s += sgl.user("Who?")
    s += sgl.assistant("Name:" + sgl.gen("name", stop="\n", temperature=0.5) + "\nAge:" + sgl.gen("age") + ".")
    s += sgl.user("And?") + sgl.assistant(sgl.gen("rest"))


def test_one_call_fills_all_variables_of_a_message() -> None:
    backend = ScriptedBackend(
        lambda request: "Name: Ada\nAge: 36. So" if len(request.messages) < 3 else "no", chat_only=True
    )
    state = form.run(backend=backend)
    assert (state["name"], state["age"], state["rest"]) == (" Ada", " 36", "no")
    assert state.messages()[1]["content"] == "Name: Ada\nAge: 36."
    first, second = backend.requests
    assert first.sampling["max_new_tokens"] == 64 and first.sampling["temperature"] == 0.5
    assert second.sampling["max_new_tokens"] == 128  # a single generation needs no speculation


def test_a_model_that_does_not_keep_the_form_is_asked_again_and_then_an_error() -> None:
    answers = iter(["Sorry", "Name: Ada\nAge: 36.", "x"])
    backend = ScriptedBackend(lambda request: next(answers), chat_only=True)
    assert form.run(backend=backend)["age"] == " 36" and len(backend.requests) == 3
    with pytest.raises(sgl.ProgramError, match="did not keep to the form 'Name:<name>"):
        form.run(backend=ScriptedBackend(lambda request: "Sorry", chat_only=True))


def test_a_model_that_would_write_the_same_again_is_asked_once() -> None:
    @sgl.function(num_api_spec_tokens=8)
    def greedy(s: Any) -> None:
        s += sgl.user("Who?") + sgl.assistant("Name:" + sgl.gen("name"))

    backend = ScriptedBackend(lambda request: "Sorry", chat_only=True)
    with pytest.raises(sgl.ProgramError, match="in 1 attempt;"):
        greedy.run(backend=backend, temperature=0)
    assert len(backend.requests) == 1


def test_reading_in_the_middle_of_a_message_asks_for_what_is_there() -> None:
    @sgl.function(num_api_spec_tokens=8)
    def early(s: Any) -> None:
        s += sgl.user("Who?")
        with s.assistant():
            s += sgl.gen("name")
            s["seen"] = s["name"]
            s += "."

    state = early.run(backend=ScriptedBackend(lambda request: "Ada", chat_only=True))
    assert state["seen"] == "Ada" and state.messages()[1]["content"] == "Ada."


def test_engines_continue_texts_and_need_no_speculation() -> None:
    backend = ScriptedBackend(lambda request: "z")
    assert form.run(backend=backend)["name"] == "z" and len(backend.requests) == 3
