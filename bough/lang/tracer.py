"""Runs programs without a model, to see what they would do.

Arguments that are not given and values that a model would write are placeholders; a program that looks into one
(`if s["x"] == …`, `for q in questions`) is followed up to there. `trace_program` records the whole graph; `trace_start`
stops at the first call of a model, and so finds what is constant and which arguments come first, without running
anything that stands behind a model's answer. A program that does not come to an end, because it catches what a
placeholder raises and tries again, is left after so many lines.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from bough.core.errors import BoughError
from bough.lang.arguments import Body
from bough.lang.graph import Graph, Lane
from bough.lang.placeholders import WRITTEN, Placeholder, StopTracing, tracing
from bough.lang.trace_states import Start, StartState, TraceState

MOST_LINES = 200_000  # of Python, in one trace


def trace_program(program: Body, given: Mapping[str, Any]) -> Graph:
    """The graph of a program, as far as it can be known."""
    lane = Lane()
    ended = _play(program, TraceState(lane), given)
    return Graph(program.name, [parameter.name for parameter in program.parameters], lane, ended)


def trace_start(program: Body, given: Mapping[str, Any], varied: Collection[str] = ()) -> Start:
    """How a program begins. A program whose way depends on an argument's value is followed up to there. `varied`
    arguments stay open though they have a default or are bound."""
    start = Start()
    _play(program, StartState(start), given, varied)
    start.arguments = list(dict.fromkeys([*start.arguments, *(parameter.name for parameter in program.parameters)]))
    return start


def _play(program: Body, state: TraceState, given: Mapping[str, Any], varied: Collection[str] = ()) -> str | None:
    """Runs the body; says why it could not be followed to its end, if so."""
    named = [p for p in program.parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = {p.name: Placeholder("arg", p.name) for p in named if p.default is p.empty}
    left_open = {p.name: Placeholder("arg", p.name) for p in named if p.name in varied}
    arguments = {**needed, **program.bound, **left_open, **given}
    try:
        with tracing(), _limited_lines():
            program.func(state, **arguments)
    except StopTracing as stop:
        return stop.reason
    except BoughError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # the body meets placeholders that it was not written for
        shown = WRITTEN.sub(r"<\2>", str(error))
        return f"{type(error).__name__}: {shown}"
    return None


@contextmanager
def _limited_lines() -> Iterator[None]:
    """Stops what goes on for too long. A debugger looks away meanwhile; it sees the real run."""
    left = MOST_LINES

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise StopTracing(f"stopped after {MOST_LINES:,} lines")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
