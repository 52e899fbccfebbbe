"""Tools and thinking with the SDKs of all three protocols against a real server with the default model.

The model is far too small to choose tools, but it goes on with a pattern: its prompt is nothing but calls (or
thoughts), so it writes one more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.system.serving import running

openai = pytest.importorskip("openai", reason="the openai SDK is not installed (pip install bough[dev])")
anthropic = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed (pip install bough[dev])")
ollama = pytest.importorskip("ollama", reason="the ollama package is not installed (pip install bough[dev])")

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
THOUGHT = "<think>One, two, three.</think>\nFour.\n"
CALLING: list[Any] = [{"role": "user", "content": CALL * 6}]
THINKING: list[Any] = [{"role": "user", "content": THOUGHT * 6}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": SCHEMA}}
GREEDY: dict[str, Any] = {"model": "any", "temperature": 0, "max_tokens": 48, "stop": ["</tool_call>", "\n<"]}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    flags = ("--max-total-tokens", "20000")
    parsers = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--chat-template", PLAIN)
    with running(*flags, *parsers) as server:
        yield server.url


def test_openai(address: str) -> None:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**GREEDY, messages=CALLING, tools=[TOOL])
        (call,) = whole.choices[0].message.tool_calls
        assert whole.choices[0].finish_reason == "tool_calls"
        assert call.type == "function" and call.function.name == "get_weather"
        assert "city" in json.loads(call.function.arguments)
        with client.chat.completions.stream(**GREEDY, messages=CALLING, tools=[TOOL]) as stream:
            events = [event.type for event in stream]
            final = stream.get_final_completion()
        assert "tool_calls.function.arguments.delta" in events and "tool_calls.function.arguments.done" in events
        assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
        thought = client.chat.completions.create(**GREEDY, messages=THINKING).choices[0].message
        assert thought.reasoning_content and "think>" not in thought.content


def test_forced_calls_always_validate(address: str) -> None:
    asked: dict[str, Any] = {"model": "any", "temperature": 1, "max_tokens": 96, "tools": [TOOL]}
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        for seed, choice in enumerate(["required", named, "required", named]):
            talk: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
            answer = client.chat.completions.create(
                **asked, messages=talk, tool_choice=choice, seed=seed, parallel_tool_calls=False
            )
            choice_made = answer.choices[0]
            for call in choice_made.message.tool_calls or ():
                jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
            assert choice_made.message.tool_calls or choice_made.finish_reason == "length"


def test_strict_tools_are_held_to_their_schemas_when_the_model_calls_them(address: str) -> None:
    """It would go on with Rome, which is none of the cities."""
    cities = {**SCHEMA, "properties": {"city": {"enum": ["Oslo", "Paris"]}}}
    tool: Any = {"type": "function", "function": {**TOOL["function"], "parameters": cities, "strict": True}}
    talk = [{"role": "user", "content": f"<think></think>\n{CALL}" * 6 + "<think></think>\n"}]
    asked = {**GREEDY, "messages": talk, "tools": [tool], "stop": None, "parallel_tool_calls": False}
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        (choice,) = client.chat.completions.create(**asked).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), cities)
        with client.chat.completions.stream(**asked) as stream:
            final = stream.get_final_completion().choices[0].message
        assert final.tool_calls[0].function.arguments == call.function.arguments


def test_openai_responses(address: str) -> None:
    flat: Any = {"type": "function", **TOOL["function"]}
    asked: dict[str, Any] = {"model": "any", "temperature": 0, "max_output_tokens": 24, "tools": [flat]}
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**asked, input=CALLING)
        calls = [item for item in whole.output if item.type == "function_call"]
        assert calls and "city" in json.loads(calls[0].arguments)
        with client.responses.stream(**asked, input=CALLING) as stream:
            events = [event.type for event in stream]
        assert "response.function_call_arguments.delta" in events and "response.function_call_arguments.done" in events
        result = {"type": "function_call_output", "call_id": calls[0].call_id, "output": "Rain."}
        again = client.responses.create(**asked, input=[result], previous_response_id=whole.id)
        assert again.previous_response_id == whole.id


def test_anthropic(address: str) -> None:
    tool: Any = {"name": "get_weather", "description": "Weather.", "input_schema": SCHEMA}
    asked: dict[str, Any] = {"model": "any", "max_tokens": 48, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as client:
        whole = client.messages.create(**asked, messages=CALLING, tools=[tool])
        used = next(block for block in whole.content if block.type == "tool_use")
        assert used.name == "get_weather" and "city" in used.input
        with client.messages.stream(**asked, messages=CALLING, tools=[tool]) as stream:
            final = stream.get_final_message()
        assert next(block for block in final.content if block.type == "tool_use").input == used.input
        enabled = {"type": "enabled", "budget_tokens": 1024}
        thought = client.messages.create(**asked, messages=THINKING, thinking=enabled)
        assert [block.type for block in thought.content][:1] == ["thinking"]


def test_ollama(address: str) -> None:
    client = ollama.Client(host=address)
    options = {"temperature": 0, "num_predict": 48, "stop": GREEDY["stop"]}
    whole = client.chat(model="any", messages=CALLING, tools=[TOOL], options=options)
    (call,) = whole.message.tool_calls
    assert call.function.name == "get_weather" and "city" in call.function.arguments
    parts = list(client.chat(model="any", messages=CALLING, tools=[TOOL], options=options, stream=True))
    assert [call for part in parts for call in part.message.tool_calls or ()] == [call]
    thought = client.chat(model="any", messages=THINKING, options=options, think=True)
    assert thought.message.thinking and "think>" not in thought.message.content


def test_native(address: str) -> None:
    found = httpx.post(f"{address}/parse_function_call", json={"text": CALL, "tools": [TOOL]}).json()
    assert found["calls"] == [{"tool_index": 0, "name": "get_weather", "parameters": '{"city": "Rome"}'}]
    thinking = {"text": THOUGHT, "reasoning_parser": "deepseek-r1"}
    apart = httpx.post(f"{address}/separate_reasoning", json=thinking).json()
    assert apart == {"reasoning_text": "One, two, three.", "text": "Four."}
