"""Texts as models are known to write them, for what a round trip through `writers` does not show."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bough.parsers import REASONING_FORMATS, TOOL_FORMATS, AnswerFormat, AnswerParser
from bough.parsers.events import Parsed

TOOLS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "at": {"type": "object"}},
    },
    "plan": {
        "type": "object",
        "properties": {
            "at": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}},
            "stops": {"type": "array", "items": {}},
            "tags": {"type": "array"},
        },
    },
    "now": {},
}
ROME = {"city": "Rome", "days": 2}


def read(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    parsed = AnswerFormat(tool_format=TOOL_FORMATS[name], tools=TOOLS).parse(text)
    return parsed.text, [(call.name, json.loads(call.arguments)) for call in parsed.calls]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        ('"{\\"city\\": \\"Rome\\", \\"days\\": 2}"', ROME),
        ('"{}"', {}),
        ('"[1]"', None),
        ('"Rome"', None),
        ('"{\\"city\\": NaN}"', None),
    ],
)
@pytest.mark.parametrize("name_first", [True, False])
def test_arguments_may_be_json_in_a_string(arguments: str, meant: Any, name_first: bool) -> None:
    members = ['"name": "weather"', f'"arguments": {arguments}']
    text = f"<tool_call>{{{', '.join(members if name_first else reversed(members))}}}</tool_call>"
    assert read("hermes", text) == ((text, []) if meant is None else ("", [("weather", meant)]))


M3 = "]<]minimax[>["
M3_TEXT = (
    'Yes.\n|<tool_call>|<invoke name="plan">|<at>|<lat>41.9|</lat>|<name>Rome|</name>|</at>|<stops>|<item>1|</item>'
    "|<item>2|</item>|</stops>|<tags>|</tags>|</invoke>|</tool_call>"
)
COHERE_TEXT = (
    '<|START_TEXT|>I look.<|END_TEXT|><|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "weather", '
    '"parameters": {"city": "Rome", "days": 2}}\n]<|END_ACTION|>'
)
KIMI_TEXT = (
    "<|open|>response<|sep|>I look.<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Rome'
    '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)
KIMI_THOUGHT = (
    "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"
    "<|close|>message<|sep|>"
)
DOTS_TEXT = (
    'ok<dots_function_call><invoke name="weather"><parameter name="city">Rome</parameter>'
    '<parameter name="days">2</parameter></invoke></dots_function_call>'
)
HUNYUAN_TEXT = (
    "<tool_calls+><tool_call+>weather<tool_sep+><arg_key+>city</arg_key+><arg_value+>Rome</arg_value+>"
    "<arg_key+>days</arg_key+><arg_value+>2</arg_value+></tool_call+></tool_calls+>"
)
INKLING_THOUGHT = (
    "<|content_thinking|>Hm.<|end_message|><|message_model|><|content_text|>Yes.<|end_message|>"
    "<|content_model_end_sampling|>"
)
MINICPM_TEXT = (
    '<function name="weather"><param name="city"><![CDATA[<b>Rome</b>]]></param><param name="days">2</param></function>'
)
GEMMA_TEXT = (
    '<|tool_call>call:plan{at:{name:<|"|>Rome, {Italy}<|"|>,lat:41.9},stops:[1,<|"|>a<|"|>,[true,null]]}<tool_call|>'
)


@pytest.mark.parametrize(
    ("name", "text", "said", "meant"),
    [
        (
            "minimax-m3",
            M3_TEXT.replace("|", M3),
            "Yes.",
            ("plan", {"at": {"lat": 41.9, "name": "Rome"}, "stops": [1, 2], "tags": []}),
        ),
        ("minicpm5", "<function name='now'></function>", "", ("now", {})),
        (
            "minicpm5",
            MINICPM_TEXT,
            "",
            ("weather", {"city": "<b>Rome</b>", "days": 2}),
        ),
        (
            "gemma4",
            GEMMA_TEXT,
            "",
            ("plan", {"at": {"name": "Rome, {Italy}", "lat": 41.9}, "stops": [1, "a", [True, None]]}),
        ),
        ("gemma4", "<|tool_call>call:weather{city:Rome, days:2}<tool_call|>", "", ("weather", ROME)),
        (
            "gigachat3",
            'Look.<|message_sep|>\nfunction call<|role_sep|>\n{"name": "now", "arguments": {}}',
            "Look.",
            ("now", {}),
        ),
        (
            "cohere_command4",
            COHERE_TEXT,
            "I look.",
            ("weather", ROME),
        ),
        (
            "kimi_k3",
            KIMI_TEXT,
            "I look.",
            ("weather", ROME),
        ),
        (
            "apertus2509",
            '<|tools_prefix|>[{"weather": {"city": "Rome", "days": 2}}]<|tools_suffix|>',
            "",
            ("weather", ROME),
        ),
        (
            "dots",
            DOTS_TEXT,
            "ok",
            ("weather", ROME),
        ),
        (
            "hunyuan",
            HUNYUAN_TEXT.replace("+", ":opensource"),
            "",
            ("weather", ROME),
        ),
    ],
)
def test_usual_texts(name: str, text: str, said: str, meant: tuple[str, Any]) -> None:
    assert read(name, text) == (said, [meant])


@pytest.mark.parametrize(
    ("name", "text", "thought", "said"),
    [
        ("cohere_command4", "Hm.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>", "Hm.", "Yes."),
        ("cohere_command4", "<|START_TEXT|>Yes.<|END_TEXT|>", "", "Yes."),
        (
            "kimi_k3",
            KIMI_THOUGHT,
            "Hm.",
            "Yes.",
        ),
        (
            "inkling",
            INKLING_THOUGHT,
            "Hm.",
            "Yes.",
        ),
        ("muse", " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>", "Hm.", "Yes."),
        ("muse", "Yes.", "", "Yes."),
        ("apertus2509", "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", "Hm.", "Yes."),
        ("dots", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ],
)
def test_usual_thinking(name: str, text: str, thought: str, said: str) -> None:
    kind = REASONING_FORMATS[name]
    for pieces in ([text], list(text)):
        parser = AnswerParser(AnswerFormat(reasoning=kind, thinking=kind.forced))
        parsed = Parsed.of([event for piece in pieces for event in parser.feed(piece)] + parser.finish())
        assert (parsed.reasoning, parsed.text) == (thought, said)


@pytest.mark.parametrize("name", ["inkling", "muse"])
def test_formats_of_messages_read_thinking_and_calls_with_either_parser(name: str) -> None:
    texts = {
        "inkling": "<|content_thinking|>Hm.<|end_message|><|message_model|>now<|content_invoke_tool_json|>"
        '{"name":"now","args":{}}<|end_message|><|content_model_end_sampling|>',
        "muse": " to=self<|message|>Hm.<|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n"
        '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls><|eot|>',
    }
    form = AnswerFormat(reasoning=REASONING_FORMATS[name], tool_format=TOOL_FORMATS[name], tools=TOOLS)
    parsed = form.parse(texts[name])
    assert (parsed.reasoning, parsed.text, [call.name for call in parsed.calls]) == ("Hm.", "", ["now"])
    assert read(name, texts[name]) == ("Hm.", [("now", {})])  # nobody asked for the thinking to be set apart
