"""Programs on a scripted back end: what they write, what they read, and in which order things happen."""

from __future__ import annotations

import json
import logging
import re
import threading
from typing import Any

import pytest

import bough as sgl
from bough.core.errors import RequestError, SettingsError
from bough.lang.backends.base import GenRequest
from tests.fakes.lang_backend import ScriptedBackend


def last_word(request: GenRequest) -> str:
    return f"<{request.text.split()[-1]}>"


def test_text_and_generations_follow_each_other() -> None:
    @sgl.function
    def two(s: Any, start: str) -> str:
        s += start + " one" + sgl.gen("a", max_tokens=7, stop="\n") + " two"
        s += sgl.gen("b", temperature=0)
        return "done"

    backend = ScriptedBackend(last_word)
    state = two.run("Go:", backend=backend, top_p=0.5)
    assert state.text() == "Go: one<one> two<two>" and (state["a"], state["b"]) == ("<one>", "<two>")
    assert state.ret_value == "done" and "a" in state and "c" not in state
    first, second = backend.requests
    assert first.text == "Go: one" and second.text == "Go: one<one> two"
    assert first.sampling["max_new_tokens"] == 7 and first.sampling["stop"] == "\n" and first.sampling["top_p"] == 0.5
    assert second.sampling["max_new_tokens"] == 128 and second.sampling["temperature"] == 0
    assert state.get_meta_info("b")["completion_tokens"] == 5
    usage = state.get_usage()
    assert (usage.requests, usage.prompt_tokens, usage.completion_tokens) == (2, 7 + 16, 10)


def test_reading_a_variable_waits_and_control_flow_is_pythons() -> None:
    @sgl.function
    def loop(s: Any) -> None:
        for i in range(5):
            s += f" {i}" + sgl.gen("step")
            if s["step"] == "<2>":
                break
        s["count"] = i

    state = loop.run(backend=ScriptedBackend(last_word))
    assert state["count"] == 2 and state.text() == " 0<0> 1<1> 2<2>"


def test_roles_make_messages_and_text() -> None:
    @sgl.function
    def chat(s: Any) -> None:
        s += sgl.system_begin() + "Be brief." + sgl.system_end()
        with s.user():
            s += "Hi "
            s += "there"
        s += sgl.assistant(sgl.gen("answer"))
        s += sgl.user_begin() + "Bye" + sgl.user_end()
        s += sgl.assistant_begin() + "Well, " + sgl.gen("end") + sgl.assistant_end()

    backend = ScriptedBackend(lambda request: "ok")
    state = chat.run(backend=backend)
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "Bye"},
        {"role": "assistant", "content": "Well, ok"},
    ]
    assert state.text().startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n")
    assert backend.requests[0].text.endswith("<|im_start|>assistant\n")
    assert backend.requests[1].messages[-1] == {"role": "assistant", "content": "Well, "}
    assert "<|im_end|>" in backend.requests[0].sampling["stop"]


def test_a_role_inside_a_role_is_refused() -> None:
    @sgl.function
    def wrong(s: Any) -> None:
        s += sgl.user_begin() + "a" + sgl.assistant_begin()

    with pytest.raises(sgl.ProgramError, match="cannot begin inside a user message"):
        wrong.run(backend=ScriptedBackend())


def test_scopes_copies_and_programs_in_programs() -> None:
    @sgl.function
    def inner(s: Any, word: str, mark: str = "!") -> int:
        s += word + sgl.gen("inner")
        return len(word + mark)

    @sgl.function
    def outer(s: Any) -> None:
        s += "a "
        with s.var_scope("both"):
            s["size"] = inner(s, "b")
        with s.copy() as t:
            t += " aside" + sgl.gen("aside")
            s["other"] = t["aside"]
        s += " end"

    state = outer.run(backend=ScriptedBackend(last_word))
    assert state.text() == "a b<b> end" and state["both"] == "b<b>" and state["size"] == 2
    assert state["other"] == "<aside>" and "aside" not in state


def test_several_samples_are_a_list_and_the_text_goes_on_with_the_first() -> None:
    @sgl.function
    def many(s: Any) -> None:
        s += "x" + sgl.gen("answers", n=3) + "."

    state = many.run(backend=ScriptedBackend(last_word))
    assert state["answers"] == ["<x>"] * 3 and state.text() == "x<x>." and len(state.get_meta_info("answers")) == 3


def test_choices_by_gen_and_select() -> None:
    @sgl.function
    def choose(s: Any) -> None:
        s += "pick "
        s += sgl.select("long", choices=["zz", "b", "yy"])
        s += sgl.gen("also", choices=["c", "a"], max_tokens=1)
        s += sgl.select("greedy", choices=["bz", "ca"], choices_method=sgl.greedy_token_selection)
        s += sgl.select("bare", choices=["q", "p"], choices_method=sgl.unconditional_likelihood_normalized)

    backend = ScriptedBackend()
    state = choose.run(backend=backend)
    assert [state[name] for name in ("long", "also", "greedy")] == ["b", "a", "bz"]
    assert state.text() == "pick babz" + state["bare"] and backend.scored[1] == ("pick b", ("c", "a"))
    assert state.get_meta_info("long")["normalized_prompt_logprobs"] == [-25.0, -1.0, -24.0]
    assert state.get_meta_info("bare")["normalized_unconditional_prompt_logprobs"] == [0.0, 0.0]


def test_bind_defaults_and_calls_by_name() -> None:
    @sgl.function
    def greet(s: Any, name: str, greeting: str = "Hello") -> None:
        s += f"{greeting}, {name}"

    backend = ScriptedBackend()
    assert greet.run(name="Ada", backend=backend).text() == "Hello, Ada"
    assert greet.bind(greeting="Hi").run("Ada", backend=backend).text() == "Hi, Ada"
    assert repr(greet) == "<program greet(name, greeting)>" and greet.__name__ == "greet"
    with pytest.raises(TypeError, match="no parameter 'nmae'"):
        greet.bind(nmae="Ada")
    assert greet("Ada", backend=backend).text() == "Hello, Ada"  # a call without a state is a run


def test_the_default_back_end_and_what_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    @sgl.function
    def plain(s: Any) -> None:
        s += "x" + sgl.gen("a")

    monkeypatch.setattr(sgl.global_config, "default_backend", None)
    with pytest.raises(SettingsError, match="set_default_backend"):
        plain.run()
    with pytest.raises(SettingsError, match="not a back end"):
        sgl.set_default_backend(object())
    sgl.set_default_backend(ScriptedBackend())
    assert plain.run()["a"] == "x" and sgl.flush_cache() and sgl.get_server_info() == {"scripted": True}


def test_constraints_reach_the_back_end_as_sampling_fields() -> None:
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        name: str

    @sgl.function
    def constrained(s: Any) -> None:
        s += "x" + sgl.gen("a", regex=r"\d+") + sgl.gen_int("b", stop=".") + sgl.gen("c", json_schema=City)
        s += sgl.gen_string("d", 9) + sgl.gen_float("e") + sgl.gen("f", dtype=bool)
        s += sgl.gen("g", json_schema={"type": "object"}) + sgl.gen("h", json_schema='{"type": "array"}')

    backend = ScriptedBackend()
    constrained.run(backend=backend)
    sent = [request.sampling for request in backend.requests]
    assert sent[0]["regex"] == r"\d+" and sent[1]["stop"] == (".", " ", "\n")
    assert json.loads(sent[2]["json_schema"])["properties"]["name"]["type"] == "string" and "regex" not in sent[2]
    assert sent[3]["max_new_tokens"] == 9 and "stop" not in sent[3]
    assert [request["json_schema"] for request in sent[6:]] == ['{"type": "object"}', '{"type": "array"}']
    for fields, fits, fails in (
        (sent[1], ["-12", "7 ", "7\n"], ["", "a", "1.5"]),
        (sent[3], ['"ab c"', '""'], ["ab", '"a"b"']),
        (sent[4], ["1.5", "-2", ".5 "], ["1.", "x"]),
        (sent[5], ["True", "False"], ["true"]),
    ):
        assert all(re.fullmatch(fields["regex"], text) for text in fits)
        assert not any(re.fullmatch(fields["regex"], text) for text in fails)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sgl.gen("a", regex="("), "not valid"),
        (lambda: sgl.gen("a", regex="a", json_schema={}), "one constraint"),
        (lambda: sgl.gen("a", dtype=list), "dtype must be one of int"),
        (lambda: sgl.select("a", choices=[]), "list of choices"),
        (lambda: sgl.select("a", choices="abc"), "list of choices"),
        (lambda: sgl.select("a", choices=(c for c in ["b", ""])), "list of choices"),
        (lambda: sgl.select("a", choices=["b"], temperature=1.0), "leave temperature at 0"),
        (lambda: sgl.gen("a", json_schema=3), "pydantic"),
        (lambda: sgl.gen("a", dtype=int, regex="a"), "not both"),
        (lambda: sgl.gen("a", choices=["a"], regex="b"), "one constraint"),
        (lambda: sgl.gen("a", choices=["a"], dtype=int), "one constraint"),
        (lambda: sgl.gen("a", choices=["a"], json_schema={}), "one constraint"),
        (lambda: sgl.gen("a", choices=[]), "list of choices"),
    ],
)
def test_wrong_expressions_are_refused_where_they_are_made(make: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        make()


def test_what_ends_a_number_comes_beside_the_stops_of_the_run() -> None:
    @sgl.function
    def count(s: Any) -> None:
        s += "x" + sgl.gen_int("a")

    backend = ScriptedBackend()
    count.run(backend=backend, stop="END")
    assert backend.requests[0].sampling["stop"] == ("END", " ", "\n")


def test_choices_may_come_from_a_generator() -> None:
    assert sgl.select("a", choices=(c for c in "bc")) == sgl.select("a", choices=["b", "c"])  # type: ignore[arg-type]


def test_only_text_and_expressions_can_be_added() -> None:
    @sgl.function
    def wrong(s: Any) -> None:
        s += 3

    with pytest.raises(sgl.ProgramError, match="takes text and expressions"):
        wrong.run(backend=ScriptedBackend())


def test_what_cannot_be_a_program_is_refused() -> None:
    async def waits(s: Any) -> None: ...

    with pytest.raises(TypeError, match="use async_run"):
        sgl.function(waits)
    with pytest.raises(TypeError, match="needs a state"):
        sgl.function(lambda: None)


def test_what_programs_wrote_can_be_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    @sgl.function
    def plain(s: Any) -> None:
        s += "x" + sgl.gen("a")

    caplog.set_level(logging.INFO, "bough.lang")
    plain.run(backend=ScriptedBackend(last_word))
    assert caplog.messages == []
    monkeypatch.setattr(sgl.global_config, "verbosity", 2)
    plain.run(backend=ScriptedBackend(last_word))
    assert caplog.messages == ["plain wrote: x<x>"]


def test_reasoning_is_kept_apart() -> None:
    @sgl.function
    def think(s: Any) -> None:
        s += sgl.user("2 + 2?")
        s += sgl.separate_reasoning(sgl.assistant(sgl.gen("answer")), model_type="qwen3")
        s += sgl.user("Sure?")

    backend = ScriptedBackend(lambda request: "<think>\nfour?\n</think>\n\nIt is 4.")
    state = think.run(backend=backend)
    assert state["answer"] == "It is 4." and state["answer_reasoning_content"] == "four?"
    assert state.messages()[1]["content"] == "It is 4." and "four?" not in state.text()
    with pytest.raises(sgl.ProgramError, match="whole answer"):
        think.run(backend=backend, stream=True).sync()


@pytest.mark.parametrize(
    ("model_type", "written", "thought", "answer"),
    [
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>four?<|end|><|start|>assistant<|channel|>final<|message|>4",
            "four?",
            "4",
        ),
        ("mistral", "[THINK]four?[/THINK]4", "four?", "4"),
        ("deepseek-r1", "four?</think>\n4", "four?", "4"),
        ("qwen3", " 4", "", " 4"),
        ("minimax-append-think", "four?</think>4", "", "<think>four?</think>4"),
    ],
)
def test_all_formats_of_the_servers_parsers_are_known(model_type: str, written: str, thought: str, answer: str) -> None:
    @sgl.function
    def think(s: Any) -> None:
        s += sgl.assistant(sgl.separate_reasoning(sgl.gen("answer"), model_type=model_type))

    backend = ScriptedBackend(lambda request: written)
    state = think.run(backend=backend)
    assert (state["answer_reasoning_content"], state["answer"]) == (thought, answer)
    assert backend.requests[0].sampling["skip_special_tokens"] is False  # marks may be special tokens


def test_an_unknown_format_is_refused_before_anything_is_generated() -> None:
    with pytest.raises(RequestError, match="no reasoning parser 'frog'") as caught:
        sgl.separate_reasoning(sgl.gen("answer"), model_type="frog")
    assert caught.value.field == "model_type"


def test_without_threads_each_thing_is_done_before_the_next() -> None:
    seen: list[int] = []
    backend = ScriptedBackend(last_word)

    @sgl.function
    def steps(s: Any) -> None:
        s += "a" + sgl.gen("x")
        seen.append(len(backend.requests))
        s += "b" + sgl.gen("y")
        seen.append(len(backend.requests))

    steps.run(backend=backend, use_thread=False)
    assert seen == [1, 2]


def test_a_state_does_not_wait_for_what_nobody_reads() -> None:
    gate = threading.Event()
    backend = ScriptedBackend(last_word, gate=gate)

    @sgl.function
    def lazy(s: Any) -> None:
        s += "a" + sgl.gen("x") + "b" + sgl.gen("y")
        branches = s.fork(2)
        branches += "c"
        assert "x" in branches[0]
        gate.set()  # had anything above waited, this line would never have come

    assert lazy.run(backend=backend).text() == "a<a>b<a<a>b>"
