"""Runs programs without a model, to see what they would do.

Arguments that are not given and values that a model would write are placeholders; a program that looks into one
(`if s["x"] == …`, `for q in questions`) is followed up to there. `trace_program` records the whole graph; `trace_start`
stops at the first call of a model, and so finds what is constant and which arguments come first, without running
anything that stands behind a model's answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bough.core.errors import BoughError
from bough.lang.graph import Graph, Lane
from bough.lang.placeholders import WRITTEN, Placeholder, StopTracing
from bough.lang.trace_states import Start, StartState, TraceState

if TYPE_CHECKING:
    from bough.lang.program import Program


def trace_program(program: Program, given: Mapping[str, Any]) -> Graph:
    """The graph of a program, as far as it can be known."""
    lane = Lane()
    ended = _play(program, TraceState(lane), given)
    return Graph(program.name, [parameter.name for parameter in program.parameters], lane, ended)


def trace_start(program: Program, given: Mapping[str, Any]) -> Start:
    """How a program begins. A program whose way depends on an argument's value is followed up to there."""
    start = Start()
    _play(program, StartState(start), given)
    start.arguments = list(dict.fromkeys([*start.arguments, *(parameter.name for parameter in program.parameters)]))
    return start


def _play(program: Program, state: TraceState, given: Mapping[str, Any]) -> str | None:
    """Runs the body; says why it could not be followed to its end, if so."""
    arguments = {p.name: Placeholder("arg", p.name) for p in program.parameters if p.default is p.empty}
    variadic = {p.name for p in program.parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    arguments = {name: value for name, value in arguments.items() if name not in variadic}
    try:
        program.func(state, **{**arguments, **program.bound, **given})
    except StopTracing as stop:
        return stop.reason
    except BoughError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001  # the body meets placeholders that it was not written for
        shown = WRITTEN.sub(r"<\2>", str(error))
        return f"{type(error).__name__}: {shown}"
    return None
