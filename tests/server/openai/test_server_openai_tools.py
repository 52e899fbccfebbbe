"""Tools and thinking of chats: shapes, choices, streams, histories."""

from __future__ import annotations

from typing import Any

import pytest

from bough.client.inputs import ThinkingMarks
from bough.core.finish import FinishAbort
from bough.server.openai import routes
from tests.server.protocol_desk import Desk, at_desk
from tests.server.tool_desk import (
    CALL,
    FUNCTION,
    MALFORMED,
    NOW,
    OSLO,
    ROME,
    SCHEMA,
    TOOL,
    TWO_CALLS,
    NotingReader,
    say,
)

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [TOOL, NOW]}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def joined(chunks: list[Any]) -> dict[str, Any]:
    """The message that a stream amounts to."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta["tool_calls"] or ():
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    assert call["type"] == "function" and call["function"]["arguments"] == ""
                    message["tool_calls"].append({**call, "function": dict(call["function"])})
                else:
                    assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
                    message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message["finish_reason"] = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]][-1]
    return message


def test_a_call() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        answer = await desk.post(CHAT, **ASK)
        (choice,) = answer["choices"]
        message = choice["message"]
        assert choice["finish_reason"] == "tool_calls"
        assert (message["content"], message["reasoning_content"]) == ("Let me see.", None)
        (call,) = message["tool_calls"]
        assert call["id"].startswith("call_") and call["type"] == "function"
        assert call["function"] == {"name": "get_weather", "arguments": ROME}
        assert notes.sampling["skip_special_tokens"] is False and not notes.grammar
        assert desk.prompt.startswith("[{") and '"get_weather"' in desk.prompt and '"now"' in desk.prompt

    say(routes, f"Let me see.\n{CALL}", use)


@pytest.mark.parametrize("cuts", [None, [], [3, 20, 21, 60]])
@pytest.mark.parametrize("strict", [False, True])
def test_a_stream_of_two_calls(cuts: list[int] | None, strict: bool) -> None:
    """The calls of a strict tool, which a grammar guards, are shown while they are written."""
    tools = [{"type": "function", "function": {**FUNCTION, "strict": strict}}]

    async def use(desk: Desk, notes: NotingReader) -> None:
        *chunks, done = await desk.stream(CHAT, **{**ASK, "tools": tools})
        assert done == "[DONE]"
        message = joined(chunks)
        assert (message["content"], message["reasoning_content"]) == ("", "Hm.")
        assert message["finish_reason"] == "tool_calls"
        names = [call["function"]["name"] for call in message["tool_calls"]]
        assert names == ["get_weather", "get_weather"]
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == [ROME, OSLO]
        assert len({call["id"] for call in message["tool_calls"]}) == 2
        if cuts is None:
            pieces = [c for c in chunks if c["choices"][0]["delta"].get("tool_calls")]
            assert len(pieces) > 20 if strict else len(pieces) == 4  # a name and its arguments, twice

    say(routes, f"<think>Hm.</think>\n\n{TWO_CALLS}", use, cuts=cuts)


def test_at_most_one_call_where_only_one_is_wanted() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        (choice,) = (await desk.post(CHAT, **ASK, parallel_tool_calls=False))["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        assert OSLO in choice["message"]["content"]

    say(routes, TWO_CALLS, use)


def test_malformed_calls_are_text() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        (choice,) = (await desk.post(CHAT, **ASK))["choices"]
        assert choice["finish_reason"] == "stop"
        assert (choice["message"]["content"], choice["message"]["tool_calls"]) == (MALFORMED, None)
        message = joined((await desk.stream(CHAT, **ASK))[:-1])
        assert (message["content"], message["finish_reason"]) == (MALFORMED, "stop")
        assert message["tool_calls"] == []

    say(routes, MALFORMED, use)


def test_a_malformed_call_leaves_no_trace_among_the_others() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        message = joined((await desk.stream(CHAT, **ASK))[:-1])
        assert [call["function"]["arguments"] for call in message["tool_calls"]] == [ROME]
        assert message["content"].startswith(MALFORMED) and message["finish_reason"] == "tool_calls"

    say(routes, f"{MALFORMED} {CALL}", use)


def test_without_tools_calls_are_text() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        changes: list[dict[str, Any]] = [{"tools": None}, {"tools": []}, {"tool_choice": "none"}]
        for more in changes:
            (choice,) = (await desk.post(CHAT, **{**ASK, **more}))["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
            assert "get_weather" not in desk.prompt

    say(routes, CALL, use, reasoning_parser=None)


@pytest.mark.parametrize(
    ("choice", "parallel", "names", "single"),
    [
        ("required", None, ["get_weather", "now"], False),
        ("required", False, ["get_weather", "now"], True),
        ({"type": "function", "function": {"name": "now"}}, None, ["now"], True),
    ],
)
def test_calls_that_must_come_are_forced_by_a_grammar(
    choice: Any, parallel: bool | None, names: list[str], single: bool
) -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        await desk.post(CHAT, **ASK, tool_choice=choice, parallel_tool_calls=parallel)
        form = notes.grammar["structural_tag"]["format"]
        begins = [tag["begin"] for tag in form["tags"]]
        assert begins == [f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names]
        assert form["stop_after_first"] is single and form["at_least_one"]
        assert ('"get_weather"' in desk.prompt) == ("get_weather" in names)

    say(routes, CALL, use)


def test_a_choice_among_some_of_the_tools() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        await desk.post(CHAT, **ASK, tool_choice=allowed("auto", "get_weather"))
        assert not notes.grammar and '"get_weather"' in desk.prompt and '"now"' not in desk.prompt
        await desk.post(CHAT, **ASK, tool_choice=allowed("required", "get_weather"))
        (tag,) = notes.grammar["structural_tag"]["format"]["tags"]
        assert "get_weather" in tag["begin"]
        flat = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
        choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
        await desk.post("/v1/responses", input="x", tools=[flat, {**flat, "name": "now"}], tool_choice=choice)
        (tag,) = notes.grammar["structural_tag"]["format"]["tags"]
        assert "get_weather" in tag["begin"]

    say(routes, CALL, use)


@pytest.mark.parametrize(("strict", "firm"), [([None, None], True), ([False, None], True), ([False, False], False)])
def test_only_tools_that_say_so_may_be_called_with_what_is_not_enforced(strict: list[bool | None], firm: bool) -> None:
    tools = [
        {"type": "function", "function": {**each["function"], "strict": said}}
        for each, said in zip((TOOL, NOW), strict, strict=True)
    ]

    async def use(desk: Desk, notes: NotingReader) -> None:
        await desk.post(CHAT, **{**ASK, "tools": tools}, tool_choice="required")
        assert notes.sampling["grammar_strict"] is firm

    say(routes, CALL, use)


@pytest.mark.parametrize(
    ("parser", "place", "path"),
    [
        ("hermes", "structural_tag#/format/tags/1/content/json_schema", CHAT),
        ("deepseekv3", "structural_tag#/format/elements/1/tags/1/content/json_schema", CHAT),
        ("gemma4", "json_schema#/items/anyOf/1/properties/parameters", CHAT),
        ("hermes", "structural_tag#/format/tags/1/content/json_schema", "/v1/responses"),
    ],
)
def test_what_is_wrong_with_a_forced_tool_is_said_of_the_tool(parser: str, place: str, path: str) -> None:
    theirs = "tools[1].function.parameters" if path == CHAT else "tools[1].parameters"
    said = (
        f"Not all of {place.partition('#')[0]} can be guaranteed: {place}/properties/t/uniqueItems cannot be enforced."
    )
    body = (
        ASK
        if path == CHAT
        else {"input": "x", "tools": [{"type": "function", **each["function"]} for each in (NOW, TOOL)]}
    )

    async def use(desk: Desk) -> None:
        error = (await desk.post(path, 400, **body, tool_choice="required"))["error"]
        assert (
            error["message"]
            == f"Not all of tools can be guaranteed: {theirs}#/properties/t/uniqueItems cannot be enforced."
        )
        assert error["param"] == theirs

    refusal = FinishAbort(said, 400, "BadRequestError", place.partition("#")[0])
    at_desk(routes, use, lambda request: refusal, tool_call_parser=parser)


def test_places_in_arguments_that_stand_one_by_one_are_those_of_the_schema() -> None:
    place = "structural_tag#/format/tags/0/content/elements/1/content/content/json_schema"
    strict = {"type": "function", "function": {**FUNCTION, "strict": True}}
    refusal = FinishAbort(f"{place}/uniqueItems cannot be enforced.", 400, "BadRequestError", "structural_tag")

    async def use(desk: Desk) -> None:
        error = (await desk.post(CHAT, 400, **{**ASK, "tools": [strict]}))["error"]
        theirs = "tools[0].function.parameters"
        assert error["message"] == f"{theirs}#/properties/days/uniqueItems cannot be enforced."
        assert error["param"] == theirs

    at_desk(routes, use, lambda request: refusal, tool_call_parser="glm45")


@pytest.mark.parametrize("strict", [True, False])
def test_a_call_may_come_instead_of_what_the_answer_must_match(strict: bool) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": strict}}

    async def use(desk: Desk, notes: NotingReader) -> None:
        answer = await desk.post(CHAT, **ASK, response_format=asked)
        assert answer["choices"][0]["finish_reason"] == "tool_calls"
        calls, otherwise = notes.grammar["structural_tag"]["format"]["elements"]
        assert [tag["content"]["json_schema"] for tag in calls["tags"]] == [{"type": "object"}] * 2
        assert otherwise == {"type": "json_schema", "json_schema": SCHEMA}
        assert notes.sampling["grammar_strict"] is strict and set(notes.grammar) == {"structural_tag"}
        await desk.post(CHAT, **ASK, response_format=asked, tool_choice="none")
        assert set(notes.grammar) == {"json_schema"}
        await desk.post(CHAT, **ASK, guided_regex="a")
        assert not notes.grammar and notes.sampling["regex"] == "a"

    async def one_by_one(desk: Desk, notes: NotingReader) -> None:
        await desk.post(CHAT, **ASK, response_format=asked)
        calls, _ = notes.grammar["structural_tag"]["format"]["elements"]
        assert (
            calls["tags"][0]["content"]["type"] == "sequence"
        )  # held to its schema: nothing else is sure to be a call
        loose = {"name": "f", "parameters": {"type": "object"}}
        await desk.post(CHAT, **{**ASK, "tools": [{"type": "function", "function": loose}]}, response_format=asked)
        assert set(notes.grammar) == {"json_schema"}

    say(routes, CALL, use)
    say(routes, CALL, one_by_one, tool_call_parser="glm45")


def test_strict_tools_are_watched_once_a_call_begins() -> None:
    strict = {"type": "function", "function": {**FUNCTION, "strict": True}}

    async def use(desk: Desk, notes: NotingReader) -> None:
        await desk.post(CHAT, **{**ASK, "tools": [strict, NOW]})
        form = notes.grammar["structural_tag"]["format"]
        assert (form["type"], form["triggers"], form["stop_after_first"]) == ("triggered_tags", ["<tool_call>"], False)
        assert [tag["content"]["json_schema"] for tag in form["tags"]] == [SCHEMA, {"type": "object"}]
        await desk.post(CHAT, **{**ASK, "tools": [strict]}, response_format={"type": "json_object"})
        calls, asked = notes.grammar["structural_tag"]["format"]["elements"]
        assert calls["type"] == "tags_with_separator" and "json_schema" not in notes.grammar
        assert asked == {"type": "json_schema", "json_schema": {"type": "object"}}
        await desk.post(CHAT, **{**ASK, "tools": [strict]}, tool_choice="none")
        assert not notes.grammar
        error = (await desk.post(CHAT, 400, **{**ASK, "tools": [strict]}, guided_choice=[]))["error"]
        assert error["message"].startswith("guided_choice is empty")

    async def watch_nothing(desk: Desk, notes: NotingReader) -> None:
        await desk.post(CHAT, **{**ASK, "tools": [strict]})
        assert not notes.grammar

    say(routes, CALL, use)
    say(routes, CALL, watch_nothing, grammar_backend="outlines-core")
    say(routes, CALL, watch_nothing, tool_call_parser="llama3")


@pytest.mark.parametrize(
    ("parser", "backend"), [(None, "xgrammar"), ("gemma4", "xgrammar"), ("hermes", "outlines-core")]
)
def test_where_a_format_cannot_be_forced_a_list_is(parser: str | None, backend: str) -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        for read in (await desk.post(CHAT, **ASK, tool_choice="required"))["choices"]:
            (call,) = read["message"]["tool_calls"]
            assert call["function"] == {"name": "get_weather", "arguments": ROME}
            assert read["finish_reason"] == "tool_calls" and read["message"]["content"] is None
        schema = notes.grammar["json_schema"]
        assert schema["items"]["anyOf"][0]["properties"]["parameters"] == SCHEMA
        message = joined((await desk.stream(CHAT, **ASK, tool_choice="required"))[:-1])
        assert message["tool_calls"][0]["function"]["arguments"] == ROME

    text = f'[{{"name": "get_weather", "parameters": {ROME}}}]'
    say(routes, text, use, tool_call_parser=parser, reasoning_parser=None, grammar_backend=backend)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools", "web_search"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "a b"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, None, "JSON schema"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}]},
            "tools[0].function.parameters",
            "Tool 0 function has invalid 'parameters' schema: $.type: 'objekt'",
        ),
        ({"tools": [TOOL, TOOL]}, "tools", "two tools called 'get_weather'"),
        ({"tool_choice": "often"}, "tool_choice", "none, auto, required"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "Tool 'f' not found in tools list.",
        ),
        (
            {"tools": [], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "Tools cannot be empty if tool choice is set to a specific tool.",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "by name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "a list of tools"),
        ({"tool_choice": allowed("often", "now")}, "tool_choice", "auto or required"),
        ({"tool_choice": allowed("auto", "f")}, "tool_choice", "Tool 'f' not found in tools list"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict", "true"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice", "response_format and"),
        ({"tool_choice": "required", "guided_regex": "a"}, "tool_choice", "guided_regex and tool_choice each say"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "no tools"),
        ({"messages": [{"role": "assistant", "tool_calls": 3}]}, "messages[0].tool_calls", "list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]", "name"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], param: str | None, said: str) -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        error = (await desk.post(CHAT, 400, **{**ASK, **fields}))["error"]
        assert said in error["message"]
        assert param is None or error["param"] == param

    say(routes, "x", use)


def test_tools_need_a_parser() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        error = (await desk.post(CHAT, 400, **ASK))["error"]
        assert "--tool-call-parser" in error["message"] and error["param"] == "tools"

    say(routes, CALL, use, tool_call_parser=None)


def test_histories_with_calls_and_results() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": ROME}}]
    broken = [{"id": "c2", "type": "function", "function": {"name": "now", "arguments": "{"}}]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": [{"type": "text", "text": "Rain."}]},
        {"role": "assistant", "tool_calls": broken},
    ]

    async def use(desk: Desk, notes: NotingReader) -> None:
        await desk.post(CHAT, messages=messages)
        lines = desk.prompt.split("\n")
        assert lines[1] == f"assistant:  thought Hm. called get_weather {ROME}"
        assert lines[2] == "tool(get_weather c1): Rain."
        assert lines[3] == 'assistant:  called now "{"'

    say(routes, "Fine.", use)


# Thinking -------------------------------------------------------------------------------------------------------------

THOUGHT = "<think>One,\ntwo.</think>Three."
SAY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count."}]}


def test_thinking_is_set_apart() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        answer = await desk.post(CHAT, **SAY)
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("One,\ntwo.", "Three.")
        assert answer["usage"]["reasoning_tokens"] == len("One,\ntwo.")  # tokens are bytes here
        assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("One,\ntwo.")}
        *chunks, last, _ = await desk.stream(CHAT, **SAY, stream_options={"include_usage": True})
        streamed = joined(chunks)
        assert (streamed["reasoning_content"], streamed["content"]) == ("One,\ntwo.", "Three.")
        assert last["usage"] == answer["usage"]
        thoughts = [c for c in chunks if c["choices"][0]["delta"].get("reasoning_content")]
        assert len(thoughts) > 3

    say(routes, THOUGHT, use)


def test_thinking_may_come_at_once_or_stay_where_it_is() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        chunks = (await desk.stream(CHAT, **SAY, stream_reasoning=False))[:-1]
        thoughts = [c["choices"][0]["delta"].get("reasoning_content") for c in chunks]
        assert [thought for thought in thoughts if thought] == ["One,\ntwo."]
        message = (await desk.post(CHAT, **SAY, separate_reasoning=False))["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == (THOUGHT, None)

    say(routes, THOUGHT, use)


def test_the_template_opens_the_thinking() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        opened = await desk.post(CHAT, **SAY, chat_template_kwargs={"enable_thinking": True})
        assert desk.prompt.endswith("<think>")
        assert opened["choices"][0]["message"]["reasoning_content"] == "One."
        plain = await desk.post(CHAT, **SAY, chat_template_kwargs={"enable_thinking": False})
        assert plain["choices"][0]["message"]["content"] == "One.</think>Two."
        going_on: dict[str, Any] = {"messages": [*SAY["messages"], {"role": "assistant", "content": "<think>Hm"}]}
        more = await desk.post(CHAT, **going_on, continue_final_message=True)
        assert more["choices"][0]["message"]["reasoning_content"] == "One."

    say(routes, "One.</think>Two.", use)


def test_grammars_hold_behind_the_thinking_and_budgets_cut_it_short() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        await desk.post(CHAT, **SAY)
        unasked: Any = notes.thinking
        assert unasked is None
        await desk.post(CHAT, **ASK, tool_choice="required")
        assert notes.thinking == ThinkingMarks("<think>", "</think>", "</think>", begun=False)
        opened = {"enable_thinking": True}
        await desk.post(CHAT, **SAY, chat_template_kwargs=opened, max_thinking_tokens=9, separate_reasoning=False)
        assert notes.thinking == ThinkingMarks("<think>", "</think>", "</think>", begun=True, budget=9)
        await desk.post("/v1/responses", input="x", max_thinking_tokens=9)
        assert notes.thinking == ThinkingMarks("<think>", "</think>", "</think>", begun=False, budget=9)

    async def without(desk: Desk, notes: NotingReader) -> None:
        error = (await desk.post(CHAT, 400, **SAY, max_thinking_tokens=9))["error"]
        assert error["param"] == "max_thinking_tokens" and "--reasoning-parser" in error["message"]

    say(routes, THOUGHT, use)
    say(routes, THOUGHT, without, reasoning_parser=None)


def test_logprobs_and_ids_of_all_tokens_come_with_parsed_streams() -> None:
    async def use(desk: Desk, notes: NotingReader) -> None:
        fields = {**ASK, "logprobs": True, "return_token_ids": True, "n": 2}
        whole = (await desk.post(CHAT, **fields))["choices"]
        chunks = (await desk.stream(CHAT, **fields))[:-1]
        for choice in whole:
            own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
            assert [i for c in own for i in c.get("token_ids", ())] == choice["token_ids"]
            logprobs = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
            assert logprobs == choice["logprobs"]["content"]

    say(routes, f"<think>a</think>b {TWO_CALLS}", use)
