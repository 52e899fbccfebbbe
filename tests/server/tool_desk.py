"""What the tests of tools and thinking share: a model that says what it is told to, and the tools of its clients."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, cast

from bough.client.inputs import InputReader, Inputs, ThinkingMarks
from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint
from bough.tokenizer.chat_template import ChatTemplate
from tests.fakes.scripted_engine import IM_END
from tests.server.protocol_desk import Desk, at_desk

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTION = {"name": "get_weather", "description": "The weather of a city.", "parameters": SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}

ROME, OSLO = '{"city": "Rome", "days": 2}', '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>'
TWO_CALLS = f'{CALL}\n<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>'
MALFORMED = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", days: 2}}\n</tool_call>'

# A template that shows everything it is given.
SHOWING = (
    "{% if tools %}{{ tools | tojson }}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}"
    "{% if m.tool_call_id %}({{ m.name }} {{ m.tool_call_id }}){% endif %}: {{ m.content }}"
    "{% if m.reasoning_content %} thought {{ m.reasoning_content }}{% endif %}"
    "{% for c in m.tool_calls or [] %} called {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>{% endif %}{% endif %}"
)


GRAMMARS = ("json_schema", "structural_tag")


class NotingReader:
    """An `InputReader` that notes the grammar it was given, and passes on the rest."""

    def __init__(self, reader: InputReader) -> None:
        self._reader = reader
        self.grammar: dict[str, Any] = {}
        self.sampling: dict[str, Any] = {}
        self.thinking: ThinkingMarks | None = None

    def read(self, **given: Any) -> Inputs:
        self.sampling = dict(given["sampling_params"])
        self.thinking = given.get("thinking")
        self.grammar = {name: self.sampling.pop(name) for name in GRAMMARS if name in self.sampling}
        return self._reader.read(**{**given, "sampling_params": self.sampling})


def say(
    routes: Callable[[ServerContext], list[Endpoint]],
    text: str,
    use: Callable[[Desk, NotingReader], Awaitable[None]],
    *,
    cuts: list[int] | None = None,
    **settings: Any,
) -> None:
    """Uses the routes of a server whose model says `text`."""
    notes: list[NotingReader] = []

    def noting(context: ServerContext) -> list[Endpoint]:
        notes.append(NotingReader(context.reader))
        return routes(dataclasses.replace(context, reader=cast(InputReader, notes[0])))

    async def with_notes(desk: Desk) -> None:
        desk.engine.tokenizer.chat_template = ChatTemplate(SHOWING)
        desk.engine.cuts = cuts
        await use(desk, notes[0])

    chosen = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", **settings}
    at_desk(noting, with_notes, lambda request: [*text.encode(), IM_END], **chosen)
