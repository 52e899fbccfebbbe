"""Muse: messages that say whom they are for. To itself the model thinks, to the user it speaks, all others are tools.

     to=self<|message|>...<|eom|><|start|>assistant to=user<|message|>...<|eot|>
    <|start|>assistant to=name<|message|><atem:function_calls><atem:invoke name="name">...

The first header has no beginning, because the prompt ends with it.
"""

from __future__ import annotations

import re

from bough.parsers.calls import Calls
from bough.parsers.events import Event, Reasoning, Text
from bough.parsers.formats.base import Framed
from bough.parsers.formats.invoke import Invoke
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Source, Steps

START, MESSAGE = "<|start|>", "<|message|>"
ENDS = ("<|eom|>", "<|eot|>")
HEADER = Markers(START, before=SPACE)
HEADER_END = Markers(MESSAGE)
BODY_END = Markers(START, *ENDS)
TO = "to="
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
ITSELF, USER = "self", "user"
CALLS = Invoke("<atem:function_calls>", "</atem:function_calls>", prefix="atem:")


class Muse(Framed):
    """Reads reasoning and calls alike; no grammar is made for its calls."""

    shape = None

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        marker: str | None = None
        if (yield from source.starts_after_space(TO)):
            source.mark()
            marker = START
        else:
            marker = yield from source.passage(HEADER, Text, mark=True)
        while marker is not None:
            try:
                marker = yield from self._message(source, calls)
            except MalformedError:
                yield calls.give_up(source)
                marker = None
            if marker != START:
                marker = yield from source.passage(HEADER, Text, mark=True)

    def _message(self, source: Source, calls: Calls) -> Steps[str | None]:
        """One message behind the beginning of its header; the marker at which it ended."""
        header, _ = yield from source.until(HEADER_END, 2 * MOST_NAME)
        found = RECIPIENT.search(header)
        recipient = USER if found is None else found[1]
        if recipient in (ITSELF, USER):
            return (yield from source.passage(BODY_END, _thought if recipient == ITSELF else _said, mark=True))
        yield from source.skip_space()
        yield from source.expect(CALLS.section)
        yield from CALLS.read_section(source, calls)
        source.mark()
        yield from source.skip_space()
        for end in ENDS:
            if (yield from source.skip_end(end)):
                break
        return ""


def _thought(text: str) -> Event:
    return Reasoning(text)


def _said(text: str) -> Event:
    return Text(text)
