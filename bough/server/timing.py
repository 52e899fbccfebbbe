"""The `Server-Timing` header of responses whose request asked for timings."""

from __future__ import annotations

from collections.abc import Sequence

from bough.client.answer import Answer

TIMING_HEADER = "Server-Timing"


def timing_headers(answers: Sequence[Answer]) -> dict[str, str]:
    """Of several answers, the one that took longest: it is what the response waited for."""
    slowest = max((answer.timings for answer in answers), key=lambda timings: timings.total_s)
    return {TIMING_HEADER: slowest.to_header(finished=all(answer.done for answer in answers))}
