"""Tool-call and reasoning formats: text in, events out, in any chunking. What is no call is text."""

from bough.parsers.answer import AnswerFormat, AnswerParser
from bough.parsers.events import Call, CallArguments, CallBegin, CallEnd, CallFailed, Event, Parsed, Reasoning, Text
from bough.parsers.reasoning import ReasoningFormat
from bough.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, reasoning_format, tool_format

__all__ = [
    "REASONING_FORMATS", "TOOL_FORMATS", "AnswerFormat", "AnswerParser", "Call", "CallArguments", "CallBegin",
    "CallEnd", "CallFailed", "Event", "Parsed", "Reasoning", "ReasoningFormat", "Text", "reasoning_format",
    "tool_format",
]  # fmt: skip
