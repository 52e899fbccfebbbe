"""What a meter is told of one answer's pace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from bough.client import pace
from bough.client.pace import Pace
from bough.core.finish import FinishAbort, FinishLength, FinishReason
from bough.messages.outputs import Delta, Started
from bough.observability.request_meter import RequestMeter, slices


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(pace.time, "perf_counter", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


STARTED = Started(1, 8, 3, queue_time_s=0.5, prefill_time_s=1.5)


def add(pace: Pace, tokens: int, started: Started | None = None, finish: FinishReason | None = None) -> None:
    pace.add(Delta(1, "", np.zeros(tokens, np.int32).tobytes(), started, finish=finish, retractions=2), tokens)


def sums(meter: RequestMeter) -> dict[str, tuple[float, float]]:
    """Of each histogram: how many values, and their sum."""

    def of(numbers: Sequence[float]) -> tuple[float, float]:
        return sum(numbers[:-1]), numbers[-1]

    return {metric.name: of(numbers) for metric, numbers in slices(meter.totals()).items() if metric.buckets}


def test_a_stream_is_timed_at_the_client(clock: Clock) -> None:
    meter = RequestMeter()
    pace = Pace(meter, clock.now)
    clock.now += 2.5
    add(pace, 1, STARTED)
    clock.now += 1.0
    add(pace, 4)
    clock.now += 0.25
    add(pace, 1, finish=FinishLength(6))
    pace.leave(0)  # after its end this means nothing
    found = sums(meter)
    assert found["time_to_first_token_seconds"] == (1, 2.5)
    assert found["inter_token_latency_seconds"] == (5, 1.25)
    assert found["e2e_request_latency_seconds"] == (1, 3.75)
    assert found["queue_time_seconds"] == (1, 0.5)
    assert found["generation_tokens_histogram"] == (1, 6) and found["num_retractions"] == (1, 2)


def test_an_answer_in_one_piece_takes_the_engines_word_for_its_first_token(clock: Clock) -> None:
    meter = RequestMeter()
    pace = Pace(meter, clock.now)
    clock.now += 6.0
    add(pace, 5, STARTED, FinishLength(5))
    found = sums(meter)
    assert found["time_to_first_token_seconds"] == (1, 2.0) and found["inter_token_latency_seconds"] == (4, 4.0)


def test_requests_without_tokens_have_no_pace(clock: Clock) -> None:
    meter = RequestMeter()
    add(Pace(meter, clock.now), 0, STARTED, FinishLength(0))
    add(Pace(meter, clock.now), 0, None, FinishAbort("too long"))
    Pace(meter, clock.now).leave(0)
    found = {metric.name: numbers for metric, numbers in slices(meter.totals()).items()}
    assert sum(found["time_to_first_token_seconds"]) == 0 and found["generation_tokens_total"] == [0]
    assert found["num_requests_total"] == [3] and found["num_aborted_requests_total"] == [2]
    assert found["prompt_tokens_total"] == [8] and found["cached_tokens_total"] == [3]
