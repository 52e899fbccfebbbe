"""Timings of a whole response, and the `Server-Timing` header of those whose request asked for it."""

from __future__ import annotations

from collections.abc import Sequence

from bough.client.answer import Answer
from bough.client.timings import Timings

TIMING_HEADER = "Server-Timing"


def timing_headers(answers: Sequence[Answer]) -> dict[str, str]:
    return {TIMING_HEADER: slowest_timings(answers).to_header(finished=all(answer.done for answer in answers))}


def slowest_timings(answers: Sequence[Answer]) -> Timings:
    """Of the answer that took longest: that is what the client waited for."""
    return max((answer.timings for answer in answers), key=lambda timings: timings.total_s)
