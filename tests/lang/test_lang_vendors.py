"""Vendors' APIs through their own SDKs, against a local server: what is sent, and what becomes of the answers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import bough as sgl
from bough.core.errors import SettingsError
from tests.fakes.vendor_server import Reply, VendorServer, vendor


@sgl.function
def chat(s: Any, question: str) -> None:
    s += sgl.system("Be brief.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=9, stop=["\n"], temperature=0))
    s += sgl.user("Sure?")
    s += sgl.assistant(sgl.gen("again"))


def openai_reply(path: str, body: dict[str, Any]) -> Reply:
    usage = {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    if body.get("stream"):
        parts: list[Any] = [
            {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in ("Par", "is")
        ]
        parts.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        parts.append({"choices": [], "usage": usage})
        frame = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        return [*((None, {**frame, **part}) for part in parts), (None, "[DONE]")]
    frame = {"id": "c", "created": 1, "model": "m", "usage": usage}
    if path.endswith("/chat/completions"):
        choices = [
            {"index": i, "finish_reason": "stop", "message": {"role": "assistant", "content": f"Paris{i or ''}"}}
            for i in range(body.get("n", 1))
        ]
        return {**frame, "object": "chat.completion", "choices": choices}
    if body.get("echo"):
        return {**frame, "object": "text_completion", "choices": [echo(i, p) for i, p in enumerate(body["prompt"])]}
    return {
        **frame,
        "object": "text_completion",
        "choices": [{"index": 0, "text": " Paris", "finish_reason": "length"}],
    }


def echo(index: int, prompt: str) -> dict[str, Any]:
    """Words with their leading space are tokens; a word's logprob is minus its length."""
    words = [word if i == 0 else f" {word}" for i, word in enumerate(prompt.split(" "))]
    offsets = [sum(map(len, words[:i])) for i in range(len(words))]
    logprobs = [None, *(-float(len(word)) for word in words[1:])]
    table = {"tokens": words, "token_logprobs": logprobs, "text_offset": offsets, "top_logprobs": None}
    return {"index": index, "text": prompt, "finish_reason": "length", "logprobs": table}


def openai(server: VendorServer, model: str = "gpt-4o", **arguments: Any) -> Any:
    return sgl.OpenAI(model, base_url=f"{server.url}/v1", api_key="k", max_retries=0, **arguments)


def test_openai_chat_sends_messages_and_counts_tokens() -> None:
    with vendor(openai_reply) as server:
        state = chat.run("Capital?", backend=openai(server))
    assert state["answer"] == state["again"] == "Paris"
    first, second = server.bodies
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital?"},
    ]
    assert (first["max_tokens"], first["stop"], first["temperature"]) == (9, ["\n"], 0)
    assert "temperature" not in second and "top_k" not in first and len(second["messages"]) == 4
    assert server.headers[0]["authorization"] == "Bearer k"
    usage = state.get_usage()
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (10, 8, 4)
    assert state.get_meta_info("answer")["finish_reason"] == {"type": "stop"}


def test_openai_streams_samples_schemas_and_newer_models() -> None:
    @sgl.function
    def typed(s: Any) -> None:
        s += sgl.user("Capital?")
        s += sgl.assistant(sgl.gen("answer", n=2, json_schema={"type": "object"}, return_logprob=True))

    with vendor(openai_reply) as server:
        state = chat.run("Capital?", backend=openai(server), stream=True)
        assert list(state.text_iter("answer")) in (["Par", "is"], ["Paris"])
        assert state.get_meta_info("answer")["prompt_tokens"] == 5
        state = typed.run(backend=openai(server, model="o4-mini"), max_new_tokens=7)
    assert state["answer"] == ["Paris", "Paris1"] and state.get_usage().completion_tokens == 2
    sent = server.bodies[-1]
    assert sent["n"] == 2 and sent["max_completion_tokens"] == 7 and "max_tokens" not in sent
    assert sent["response_format"]["json_schema"]["schema"] == {"type": "object"} and sent["logprobs"] is True


def schema_reply(*answers: str) -> Any:
    """One answer after the other; a request for several gets several."""
    left = iter(answers)

    def reply(path: str, body: dict[str, Any]) -> Reply:
        frame: Any = openai_reply(path, body)
        for choice in frame["choices"]:
            choice["message"]["content"] = next(left)
        return frame  # type: ignore[no-any-return]

    return reply


def ask(expr: Any, server: VendorServer, **arguments: Any) -> Any:
    @sgl.function
    def asks(s: Any) -> None:
        s += sgl.user("How much?") + sgl.assistant(expr)

    return asks.run(backend=openai(server), **arguments)


@pytest.mark.parametrize(
    ("expr", "kind", "answer", "text"),
    [
        (sgl.gen_int("x", 4), "integer", '{"value": -12}', "-12"),
        (sgl.gen("x", 4, regex=sgl.REGEX_INT), "integer", '{\n "value": 7\n}', "7"),
        (sgl.gen_float("x", 4), "number", '{"value": 1.25}', "1.25"),
        (sgl.gen_float("x", 4), "number", '{"value": 2}', "2"),
        (sgl.gen_float("x", 4), "number", '{"value": 1.5e-7}', "0.00000015"),  # as the regex has it
        (sgl.gen("x", 4, dtype=bool), "boolean", '{"value": true}', "True"),
        (sgl.gen_string("x", 4), "string", '{"value": "New\\nYork"}', '"New\nYork"'),
        (sgl.gen_string("x", 4, stop="Y"), "string", '{"value": "New York"}', '"New '),  # as an engine stops
    ],
)
def test_openai_holds_a_chat_model_to_a_type_by_a_schema(expr: Any, kind: str, answer: str, text: str) -> None:
    with vendor(schema_reply(answer)) as server:
        state = ask(expr, server)
    assert state["x"] == text and state.messages()[-1] == {"role": "assistant", "content": text}
    (sent,) = server.bodies
    asked = sent["response_format"]["json_schema"]
    assert asked["strict"] is True and asked["schema"]["properties"]["value"]["type"] == kind
    assert asked["schema"]["required"] == ["value"] and asked["schema"]["additionalProperties"] is False
    assert sent["max_tokens"] > 4 and "stop" not in sent and "regex" not in sent  # a stop would cut the JSON


def cut_reply(answer: str) -> Any:
    def reply(path: str, body: dict[str, Any]) -> Reply:
        frame: Any = schema_reply(answer)(path, body)
        frame["choices"][0]["finish_reason"] = "length"
        return frame  # type: ignore[no-any-return]

    return reply


@pytest.mark.parametrize(
    ("expr", "answer", "text"),
    [
        (sgl.gen_int("x"), '{"value": 1234567', "1234567"),
        (sgl.gen_int("x"), '{\n "value": -12.', "-12"),
        (sgl.gen_int("x"), '{"value": 7}', "7"),
        (sgl.gen_float("x"), '{"value": 0.1250000', "0.1250000"),
        (sgl.gen_float("x"), '{"value": 2.', "2"),
        (sgl.gen_string("x"), '{"value": "New\\nYo', '"New\nYo'),
        (sgl.gen_string("x"), '{"value": "caf\\u00', '"caf'),
        (sgl.gen_string("x"), '{"value": "York"  ', '"York"'),
        (sgl.gen_string("x", stop="Y"), '{"value": "New Yo', '"New '),
    ],
)
def test_a_typed_value_that_the_limit_cuts_off_is_what_there_is_of_it(expr: Any, answer: str, text: str) -> None:
    with vendor(cut_reply(answer)) as server:
        assert ask(expr, server)["x"] == text


@pytest.mark.parametrize("answer", ["", '{"value": ', '{"value": -', '{"value": "7', '{"x": 7'])
def test_a_cut_off_answer_without_a_value_is_an_error(answer: str) -> None:
    with vendor(cut_reply(answer)) as server, pytest.raises(sgl.ProgramError, match="raise max_tokens"):
        ask(sgl.gen_int("x"), server)


def test_typed_values_come_in_samples_and_whole_in_streams() -> None:
    with vendor(schema_reply('{"value": 1}', '{"value": 2}', '{"value": 3}')) as server:
        assert ask(sgl.gen_int("x", n=2), server)["x"] == ["1", "2"]
        streamed = ask(sgl.gen_int("x"), server, stream=True)
        assert list(streamed.text_iter("x")) == ["3"]


@pytest.mark.parametrize("answer", ["", "7", "[7]", '{"value": ', '{"value": 1.5}', '{"value": "7"}', '{"x": 7}'])
def test_an_answer_that_is_not_of_the_type_is_an_error(answer: str) -> None:
    with (
        vendor(schema_reply(answer)) as server,
        pytest.raises(sgl.ProgramError, match=r"'integer'}; raise max_tokens if it is cut off"),
    ):
        ask(sgl.gen_int("x"), server)


def test_a_back_end_counts_the_tokens_of_all_its_programs() -> None:
    with vendor(openai_reply) as server:
        backend = openai(server)
        chat.run_batch([{"question": "a"}, {"question": "b"}], backend=backend)
        chat.run("c", backend=backend, stream=True).sync()
        assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (30, 12)
        backend.token_usage.reset()
        assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (0, 0)
        chat.run("d", backend=backend)
        assert (backend.token_usage.prompt_tokens, backend.token_usage.completion_tokens) == (10, 4)


def test_openai_completions_continue_text_and_score_choices() -> None:
    @sgl.function
    def plain(s: Any) -> None:
        s += "The capital is" + sgl.gen("city", max_tokens=3) + ". It is "
        s += sgl.select("size", choices=["enormous", "big"])

    with vendor(openai_reply) as server:
        backend = openai(server, "any", is_chat_model=False, chat_template="chatml")
        state = plain.run(backend=backend)
        assert state["city"] == " Paris" and state["size"] == "big"
        assert server.bodies[0]["prompt"] == "The capital is" and server.bodies[1]["max_tokens"] == 0
        tokens = state.get_meta_info("size")["input_token_logprobs"]
        assert [entry[2] for entry in tokens[1]] == [" big"]  # the space before the choice is healed
        with pytest.raises(sgl.ProgramError, match="has no json_schema"):
            typed_text.run(backend=backend)
        with pytest.raises(sgl.ProgramError, match=r"cannot hold this generation to a type .*; use a chat model"):
            counted.run(backend=backend)
        with pytest.raises(sgl.ProgramError, match="unconditional_likelihood_normalized needs; use token_length"):
            alone.run(backend=backend)
        assert "<|im_start|>user\nCapital?" in chat.run("Capital?", backend=backend).text()


@sgl.function
def alone(s: Any) -> None:
    s += "It is " + sgl.select("x", ["big", "small"], choices_method=sgl.unconditional_likelihood_normalized)


@sgl.function
def counted(s: Any) -> None:
    s += "Its inhabitants: " + sgl.gen_int("x")


@sgl.function
def typed_text(s: Any) -> None:
    s += "The capital as JSON: " + sgl.gen("x", json_schema={"type": "object"})


def test_what_a_chat_api_cannot_do_is_told() -> None:
    @sgl.function
    def choose(s: Any) -> None:
        s += sgl.user("a") + sgl.assistant(sgl.select("x", choices=["a", "b"]))

    @sgl.function
    def middle(s: Any) -> None:
        s += sgl.user("a") + sgl.assistant("Well, " + sgl.gen("x"))

    @sgl.function
    def regex(s: Any) -> None:
        s += sgl.user("a") + sgl.assistant(sgl.gen("x", regex="a"))

    with vendor(openai_reply) as server:
        backend = openai(server)
        for program, words in (
            (choose, "cannot score"),
            (middle, "num_api_spec_tokens"),
            (regex, "OpenAI's API has no regex"),
        ):
            with pytest.raises(sgl.ProgramError, match=words):
                program.run(backend=backend)
        assert server.bodies == []
        server.script = lambda path, body: (400, {"error": {"message": "bad model", "type": "x"}})
        with pytest.raises(sgl.ProgramError, match="bad model"):
            chat.run("a", backend=backend)
    with pytest.raises(sgl.ProgramError, match="Connection error"):
        chat.run("a", backend=openai(server))


def test_openai_pictures_and_speculation(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"\x89PNG...")

    @sgl.function(num_api_spec_tokens=32)
    def look(s: Any) -> None:
        s += sgl.user(sgl.image(str(tmp_path / "cat.png")) + "Who? " + sgl.image("https://example.org/a.jpg"))
        s += sgl.assistant("Pa" + sgl.gen("x", stop="i") + "i" + sgl.gen("y"))

    with vendor(openai_reply) as server:
        state = look.run(backend=openai(server))
    assert (state["x"], state["y"]) == ("r", "s") and len(server.bodies) == 1
    parts = server.bodies[0]["messages"][0]["content"]
    assert server.bodies[0]["model"] == "gpt-4o"
    assert parts[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert parts[1] == {"type": "text", "text": "Who? "} and parts[2]["image_url"]["url"] == "https://example.org/a.jpg"
    with pytest.raises(sgl.ProgramError, match=r"gone.png' cannot be read"):
        look_at_nothing.run(backend=openai(server))


@sgl.function
def watch(s: Any, film: str) -> None:
    s += sgl.user(sgl.video(film, 4) + "Who?") + sgl.assistant(sgl.gen("x"))


def test_films_are_for_servers_that_know_them(tmp_path: Path) -> None:
    (tmp_path / "film.mp4").write_bytes(b"....ftyp....")
    with vendor(openai_reply) as server:
        watch.run(str(tmp_path / "film.mp4"), backend=openai(server))
        film, words = server.bodies[0]["messages"][0]["content"]
    assert film["video_url"]["url"].startswith("data:video/mp4;base64,") and film["video_url"]["num_frames"] == 4
    assert film["type"] == "video_url" and words["text"] == "Who?"
    with vendor(anthropic_reply) as server, pytest.raises(sgl.ProgramError, match=r"takes no video\(\)"):
        claude = sgl.Anthropic(model="claude", base_url=server.url, api_key="k", max_retries=0)
        watch.run(str(tmp_path / "film.mp4"), backend=claude)


@sgl.function
def look_at_nothing(s: Any) -> None:
    s += sgl.user(sgl.image("gone.png")) + sgl.assistant(sgl.gen("x"))


def anthropic_reply(path: str, body: dict[str, Any]) -> Reply:
    usage = {"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 2}
    message = {"id": "m", "type": "message", "role": "assistant", "model": "c", "stop_sequence": None, "usage": usage}
    if not body.get("stream"):
        return {**message, "content": [{"type": "text", "text": "Paris"}], "stop_reason": "max_tokens"}
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        for text in ("Par", "is")
    ]
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {**message, "content": [], "stop_reason": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        *deltas,
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ]
    return [(event["type"], event) for event in events]


def test_anthropic_sends_messages_whole_and_streamed() -> None:
    with vendor(anthropic_reply) as server:
        backend = sgl.Anthropic(model="claude", base_url=server.url, api_key="k", max_retries=0)
        state = chat.run("Capital?", backend=backend)
        assert state["answer"] == "Paris" and state.get_meta_info("again")["finish_reason"] == {"type": "length"}
        usage = state.get_usage()
        assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (10, 4, 4)
        first = server.bodies[0]
        assert first["system"] == "Be brief." and first["messages"] == [{"role": "user", "content": "Capital?"}]
        assert (first["max_tokens"], first["stop_sequences"], first["temperature"]) == (9, ["\n"], 0)
        state = chat.run("Capital?", backend=backend, stream=True)
        assert "".join(state.text_iter("answer")) == "Paris" and state.get_meta_info("answer")["prompt_tokens"] == 5
        assert len(chat.bind(question="a").run(backend=backend, n=2)["again"]) == 2
        server.script = lambda path, body: (400, {"type": "error", "error": {"type": "x", "message": "bad one"}})
        with pytest.raises(sgl.ProgramError, match="bad one"):
            chat.run("a", backend=backend)


@pytest.mark.parametrize("name", ["OpenAI", "Anthropic", "LiteLLM"])
def test_a_missing_sdk_is_an_error_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def gone(module: str, *rest: Any) -> Any:
        if module == name.lower():
            raise ImportError(module)
        return real(module, *rest)

    monkeypatch.setattr(importlib, "import_module", gone)
    with pytest.raises(SettingsError, match=rf"pip install 'bough\[{name.lower()}\]'"):
        getattr(sgl, name)("model")
