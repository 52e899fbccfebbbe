"""Formats made of messages with headers, which tell thinking, text and calls apart by themselves."""

import json
import re
from collections.abc import Callable
from functools import partial

from bough.parsers.events import Reasoning, Text
from bough.parsers.formats.base import Calls, Framed, Shape
from bough.parsers.formats.json_calls import call_object
from bough.parsers.formats.tagged_arguments import Invoke
from bough.parsers.source import MOST_NAME, SPACE, MalformedError, Markers, Show, Source, Steps

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
HEADER_END = Markers(MESSAGE)
RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def read_messages(
    source: Source,
    calls: Calls,
    header: Markers,
    message: Callable[[str], Steps[str | None]],
    again: tuple[str, ...],
    marker: str | None = None,
) -> Steps[None]:
    """A stream of messages. `message` reads one behind the first `marker` of its header and gives the marker at which
    it ended: one of `again` begins the next. What stands between messages is text."""
    while marker is not None or (marker := (yield from source.passage(header, Text, mark=True))) is not None:
        try:
            ended = yield from message(marker)
        except MalformedError:
            yield calls.give_up(source)
            ended = None
        marker = ended if ended in again else None


def skip_one(source: Source, ends: tuple[str, ...]) -> Steps[None]:
    source.mark()
    yield from source.skip_space()
    for end in ends:
        if (yield from source.skip_end(end)):
            return


class Harmony(Framed):
    """The format of gpt-oss: a header names a channel and, for a call, the tool that it goes to.

        <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>
        <|start|>assistant<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>

    The channel `analysis` is reasoning; calls go to `functions.`; everything else is said to the user. The last marker
    of an answer is a stop token, so it is often missing.
    """

    ENDS = ("<|end|>", "<|call|>", "<|return|>")
    HEADER, BODY_END = Markers(START, CHANNEL, before=SPACE), Markers(START, CHANNEL, *ENDS)
    CHANNEL_NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
    FUNCTIONS = "functions."
    shape = Shape(
        begin=lambda name: f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}",
        end="",
        between=f"<|call|>{START}assistant",
    )

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        message = partial(self._message, source, calls)
        yield from read_messages(source, calls, self.HEADER, message, (START, CHANNEL))

    def _message(self, source: Source, calls: Calls, marker: str) -> Steps[str | None]:
        header, _ = yield from source.until(HEADER_END, 2 * MOST_NAME)
        header = marker + header
        channel, recipient = self.CHANNEL_NAME.search(header), RECIPIENT.search(header)
        if recipient is None:
            show: Show = Reasoning if channel is not None and channel[1] == "analysis" else Text
            return (yield from source.passage(self.BODY_END, show, mark=True))
        if not recipient[1].startswith(self.FUNCTIONS):
            raise MalformedError(f"nobody here is {recipient[1]!r}")
        yield calls.begin(recipient[1].removeprefix(self.FUNCTIONS))
        yield from calls.json_arguments(source)
        yield calls.end()
        yield from skip_one(source, self.ENDS)
        return None


class Muse(Framed):
    """Messages say whom they are for. To itself the model thinks, to the user it speaks, all others are tools.

         to=self<|message|>...<|eom|><|start|>assistant to=user<|message|>...<|eot|>
        <|start|>assistant to=name<|message|><atem:function_calls><atem:invoke name="name">...

    The first header has no beginning, because the prompt ends with it. No grammar is made for its calls.
    """

    ENDS = ("<|eom|>", "<|eot|>")
    HEADER, BODY_END = Markers(START, before=SPACE), Markers(START, *ENDS)
    CALLS = Invoke("<atem:function_calls>", "</atem:function_calls>", prefix="atem:")

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        marker = None
        if (yield from source.starts_after_space("to=")):
            source.mark()
            marker = START
        yield from read_messages(source, calls, self.HEADER, lambda _: self._message(source, calls), (START,), marker)

    def _message(self, source: Source, calls: Calls) -> Steps[str | None]:
        header, _ = yield from source.until(HEADER_END, 2 * MOST_NAME)
        found = RECIPIENT.search(header)
        recipient = "user" if found is None else found[1]
        if recipient in ("self", "user"):
            show: Show = Reasoning if recipient == "self" else Text
            return (yield from source.passage(self.BODY_END, show, mark=True))
        yield from source.expect_after_space(self.CALLS.section)
        yield from self.CALLS.read_invokes(source, calls)
        yield from skip_one(source, self.ENDS)
        return None


class Inkling(Framed):
    """Messages whose content has a kind of its own.

    <|message_model|><|content_thinking|>...<|end_message|>
    <|message_model|><|content_text|>...<|end_message|>
    <|message_model|>name<|content_invoke_tool_json|>{"name": "name", "args": {...}}<|end_message|>
    """

    MODEL, THINKING, SAID = "<|message_model|>", "<|content_thinking|>", "<|content_text|>"
    CALL, ENDS = "<|content_invoke_tool_json|>", ("<|end_message|>", "<|content_model_end_sampling|>")
    KINDS, BODY_END = Markers(THINKING, SAID, CALL), Markers(*ENDS)
    HEADER = Markers(MODEL, THINKING, SAID, CALL, *ENDS, before=SPACE)
    shape = Shape(
        begin=lambda name: f'<|message_model|>{name}<|content_invoke_tool_json|>{{"name": {json.dumps(name)}, "args": ',
        end="}<|end_message|>",
    )

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from read_messages(source, calls, self.HEADER, lambda kind: self._message(source, calls, kind), ())

    def _message(self, source: Source, calls: Calls, kind: str) -> Steps[str | None]:
        if kind == self.MODEL:
            _, kind = yield from source.until(self.KINDS, MOST_NAME)
        if kind == self.CALL:
            yield from source.skip_space()
            yield from call_object(source, calls)
            yield from skip_one(source, self.ENDS[:1])
        elif kind in (self.THINKING, self.SAID):
            show: Show = Reasoning if kind == self.THINKING else Text
            yield from source.passage(self.BODY_END, show)
        return None
