"""Inkling: messages whose content has a kind of its own.

<|message_model|><|content_thinking|>...<|end_message|>
<|message_model|><|content_text|>...<|end_message|>
<|message_model|>name<|content_invoke_tool_json|>{"name": "name", "args": {...}}<|end_message|>
"""

from __future__ import annotations

import json

from bough.parsers.calls import Calls
from bough.parsers.events import Event, Reasoning, Text
from bough.parsers.formats.base import Framed, Shape
from bough.parsers.formats.json_call import call_object
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Source, Steps

MESSAGE = "<|message_model|>"
THINKING, SAID, CALL = "<|content_thinking|>", "<|content_text|>", "<|content_invoke_tool_json|>"
END, LAST = "<|end_message|>", "<|content_model_end_sampling|>"
KINDS = Markers(THINKING, SAID, CALL)
ANY = Markers(MESSAGE, THINKING, SAID, CALL, END, LAST, before=SPACE)
BODY_END = Markers(END, LAST)


class Inkling(Framed):
    """Reads reasoning and calls alike."""

    shape = Shape(
        begin=lambda name: f'{MESSAGE}{name}{CALL}{{"name": {json.dumps(name)}, "args": ',
        end=f"}}{END}",
    )

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        while (marker := (yield from source.passage(ANY, Text, mark=True))) is not None:
            try:
                yield from self._message(source, calls, marker)
            except MalformedError:
                yield calls.give_up(source)

    def _message(self, source: Source, calls: Calls, kind: str) -> Steps[None]:
        if kind == MESSAGE:
            _, kind = yield from source.until(KINDS, MOST_NAME)
        if kind == CALL:
            yield from source.skip_space()
            yield from call_object(source, calls)
            source.mark()
            yield from source.skip_space()
            yield from source.skip_end(END)
        elif kind in (THINKING, SAID):
            yield from source.passage(BODY_END, _thought if kind == THINKING else _said)


def _thought(text: str) -> Event:
    return Reasoning(text)


def _said(text: str) -> Event:
    return Text(text)
