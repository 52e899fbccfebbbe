"""From an answer's text to what a protocol shows of it: which parsers a request's answers go through, and how far each
of its streams has come.

A plan is made before the request is sent, because it adds to the sampling parameters: markers must stay in the text,
and calls that must come are forced by a grammar.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bough.client.inputs import ThinkingMarks
from bough.client.piece import Piece
from bough.core.errors import RequestError
from bough.core.sampling_params import GRAMMAR_FIELDS
from bough.core.settings import Settings
from bough.parsers import (
    AnswerFormat,
    AnswerParser,
    Call,
    CallBegin,
    CallEnd,
    Event,
    Reasoning,
    ReasoningFormat,
    forced_format,
    forced_openings,
    reasoning_format,
    tool_format,
)
from bough.parsers.formats.base import ToolFormat
from bough.server.call_rules import CallRules, asked_for
from bough.server.errors import add_field_names
from bough.server.tools import NO_TOOLS, ToolUse
from bough.tokenizer.tokenizer import Tokenizer

WITHOUT_TAGS = ("outlines-core", "outlines", "none")  # grammar back ends that know no structural tags


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """How the answers of one request are made and read."""

    tools: ToolUse = NO_TOOLS
    thinking: ReasoningFormat | None = None  # how the model sets it apart
    separate: bool = True  # whether it is shown apart
    stream_reasoning: bool = True
    calls: ToolFormat | None = None  # the format of the model's own calls
    tags: bool = True  # whether grammars may be structural tags
    tokenizer: Tokenizer | None = None

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """How thinking is read; None where it stays in the text."""
        return self.thinking if self.separate else None

    @property
    def rules(self) -> CallRules:
        return CallRules(self.tools, self.calls, self.tags, self.tokenizer)

    def marks(
        self, sampling: Mapping[str, Any], prompt: str, continued: str = "", budget: int | None = None
    ) -> ThinkingMarks | None:
        """What the engine must know of the thinking: a grammar holds behind it, and a budget cuts it short."""
        kind = self.thinking
        if kind is None:
            if budget is not None:
                raise RequestError(
                    "max_thinking_tokens needs a server that knows how its model thinks; start it with "
                    "--reasoning-parser.",
                    field="max_thinking_tokens",
                )
            return None
        begun = kind.thinks_from_start(prompt, continued)
        switched_off = not begun and prompt.rstrip().endswith(kind.end)
        if switched_off or (budget is None and asked_for(sampling) is None):
            return None
        return ThinkingMarks(kind.start, kind.end, kind.cut, begun, budget)

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling parameters with what the plan adds to them. A client that wants markers hidden gets that. What
        is said of a grammar over tools later is said of the tools."""
        added: dict[str, Any] = {}
        if self.reasoning is not None or self.tools.tools:
            added["skip_special_tokens"] = False
        if given.get("skip_special_tokens") is not None:
            added.pop("skip_special_tokens", None)
        grammar = self.rules.grammar(given)
        if grammar is None:
            return {**given, **added}
        add_field_names({place: self.tools.where(found.tool, found.pointer) for place, found in grammar.places.items()})
        add_field_names({name: "tools" for name in grammar.fields if name in GRAMMAR_FIELDS})
        kept = {name: value for name, value in given.items() if name not in GRAMMAR_FIELDS}
        return {**kept, **added, **grammar.fields}

    def answers(self, prompt: str = "", continued: str = "") -> AnswerFormat:
        """How answers to a prompt are read; `continued` are the words of the assistant that they go on with."""
        calls = None
        if self.tools.tools:
            calls = forced_format(self.rules.forcible) if self.tools.must else self.calls
        return AnswerFormat(
            reasoning=self.reasoning,
            thinking=self.reasoning is not None and self.reasoning.thinks_from_start(prompt, continued),
            stream_reasoning=self.stream_reasoning,
            tool_format=calls,
            tools=self.tools.schemas,
            most_calls=1 if self.tools.single else None,
            eager=self.rules.assured | self.tools.eager_names,
            openings=forced_openings(self.rules.forcible, self.tools.schemas) if self.tools.must else (),
        )


def plan_answers(
    settings: Settings,
    tools: ToolUse = NO_TOOLS,
    tokenizer: Tokenizer | None = None,
    *,
    separate: bool = True,
    stream_reasoning: bool = True,
) -> AnswerPlan:
    """The plan of a request, by the server's parsers and the model's tokenizer. `separate`: thinking is set apart where
    there is a parser."""
    calls, thinking = settings.model.tool_call_parser, settings.model.reasoning_parser
    if tools.tools and not tools.must and calls is None:
        raise RequestError(
            "tools need a server that knows how its model writes calls; start it with --tool-call-parser, "
            "or force a call with tool_choice.",
            field="tools",
        )
    return AnswerPlan(
        tools=tools,
        thinking=None if thinking is None else reasoning_format(thinking),
        separate=separate,
        stream_reasoning=stream_reasoning,
        calls=None if calls is None else tool_format(calls),
        tags=settings.scheduler.grammar_backend not in WITHOUT_TAGS,
        tokenizer=tokenizer,
    )


class CallIds:
    """Names the calls of one answer: by the model's own ids where it has them and they are different, else by lot."""

    def __init__(self, prefix: str = "call_") -> None:
        self._prefix = prefix
        self._taken: set[str] = set()

    def name(self, call: Call | CallBegin) -> str:
        chosen = call.id if call.id and call.id not in self._taken else f"{self._prefix}{uuid.uuid4().hex[:24]}"
        self._taken.add(chosen)
        return chosen


class AnswerTrack:
    """How far one streamed answer has come."""

    def __init__(self, form: AnswerFormat, id_prefix: str = "call_") -> None:
        self.called = False  # it has made a complete call
        self.ids = CallIds(id_prefix)
        self._parser = AnswerParser(form)
        self._reasoning: list[str] = []

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def events(self, piece: Piece) -> list[Event]:
        """What a piece brings."""
        events = self._parser.feed(piece.text) if piece.text else []
        if piece.finish is not None:
            events += self._parser.finish()
        return self._noted(events)

    def recall(self, text: str) -> list[Event]:
        """What the reader has had of a resumed answer: it decides how the rest is read, and is not to be sent again."""
        return self._noted(self._parser.feed(text) if text else [])

    def _noted(self, events: list[Event]) -> list[Event]:
        for event in events:
            if isinstance(event, CallEnd):
                self.called = True
            elif isinstance(event, Reasoning):
                self._reasoning.append(event.text)
        return events
