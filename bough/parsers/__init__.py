"""Tool-call and reasoning formats: text in, events out, in any chunking.

A format is a grammar (`formats/`) over a stream that may stop anywhere (`source`). Nothing here raises on account of
what a model writes: what is no call is text.
"""

from __future__ import annotations

from bough.parsers.answer import AnswerFormat, AnswerParser
from bough.parsers.events import Call, CallArguments, CallBegin, CallEnd, CallFailed, Event, Parsed, Reasoning, Text
from bough.parsers.forcing import (
    CallGrammar,
    can_watch,
    forced_calls,
    forced_format,
    forced_openings,
    has_json_arguments,
    watched_calls,
)
from bough.parsers.reasoning import REASONING_FORMATS, ReasoningFormat, reasoning_format
from bough.parsers.registry import TOOL_FORMATS, tool_format

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "AnswerFormat",
    "AnswerParser",
    "Call",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "CallFailed",
    "CallGrammar",
    "Event",
    "Parsed",
    "Reasoning",
    "ReasoningFormat",
    "Text",
    "can_watch",
    "forced_calls",
    "forced_format",
    "forced_openings",
    "has_json_arguments",
    "reasoning_format",
    "tool_format",
    "watched_calls",
]
