"""Harmony, the format of gpt-oss: messages with a header that names a channel and, for a call, the tool it goes to.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
    <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>

What stands in the channel `analysis` is reasoning; calls go to `functions.`; everything else is said to the user. The
last marker of an answer is a stop token, so it is often not there.
"""

from __future__ import annotations

import re

from bough.parsers.calls import Calls
from bough.parsers.events import Event, Reasoning, Text
from bough.parsers.formats.base import Framed, Shape
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Source, Steps

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HEADER = Markers(START, CHANNEL, before=SPACE)
HEADER_END = Markers(MESSAGE)
BODY_END = Markers(START, CHANNEL, *ENDS)
CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FUNCTIONS = "functions."


class Harmony(Framed):
    """Reads reasoning and calls alike, whichever of the two parsers it was chosen for."""

    shape = Shape(
        begin=lambda name: f"{CHANNEL}commentary to={FUNCTIONS}{name} <|constrain|>json{MESSAGE}",
        end="",
        between=f"<|call|>{START}assistant",
    )

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        marker = yield from source.passage(HEADER, Text, mark=True)
        while marker is not None:
            try:
                marker = yield from self._message(source, calls, marker)
            except MalformedError:
                yield calls.give_up(source)
                marker = None
            if marker not in (START, CHANNEL):  # what stands between messages, or is none
                marker = yield from source.passage(HEADER, Text, mark=True)

    def _message(self, source: Source, calls: Calls, marker: str) -> Steps[str | None]:
        """One message behind the first marker of its header; the marker at which it ended."""
        header, _ = yield from source.until(HEADER_END, 2 * MOST_NAME)
        header = marker + header
        channel, recipient = CHANNEL_NAME.search(header), RECIPIENT.search(header)
        if recipient is None:
            show = Reasoning if channel is not None and channel[1] == "analysis" else Text
            return (yield from self._body(source, show))
        if not recipient[1].startswith(FUNCTIONS):
            raise MalformedError(f"nobody here is {recipient[1]!r}")
        yield calls.begin(recipient[1].removeprefix(FUNCTIONS))
        yield from calls.json_arguments(source)
        yield calls.end()
        source.mark()
        yield from source.skip_space()
        for end in ENDS:
            if (yield from source.skip_end(end)):
                break
        return ""

    def _body(self, source: Source, show: type[Text] | type[Reasoning]) -> Steps[str | None]:
        def shown(text: str) -> Event:
            return show(text)

        return (yield from source.passage(BODY_END, shown, mark=True))
