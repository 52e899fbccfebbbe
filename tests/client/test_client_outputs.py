"""What a meter is told of one answer's recorder."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bough.client.outputs import LatencyRecorder
from bough.core.finish import FinishAbort, FinishLength, FinishReason
from bough.messages.outputs import Delta, Started
from bough.observability.request_meter import RequestMeter, slices

STARTED = Started(1, 8, 3, queue_time_s=0.5, prefill_time_s=1.5)


def add(
    recorder: LatencyRecorder,
    now: float,
    tokens: int,
    started: Started | None = None,
    finish: FinishReason | None = None,
) -> None:
    recorder.add(Delta(1, "", np.zeros(tokens, np.int32).tobytes(), started, finish=finish, retractions=2), tokens, now)


def sums(meter: RequestMeter) -> dict[str, tuple[float, float]]:
    """Of each histogram: how many values, and their sum."""

    def of(numbers: Sequence[float]) -> tuple[float, float]:
        return sum(numbers[:-1]), numbers[-1]

    return {metric.name: of(numbers) for metric, numbers in slices(meter.totals()).items() if metric.buckets}


def test_a_stream_is_timed_at_the_client() -> None:
    meter = RequestMeter()
    recorder = LatencyRecorder(meter, received_at=100.0)
    add(recorder, 102.5, 1, STARTED)
    add(recorder, 103.5, 4)
    add(recorder, 103.75, 1, finish=FinishLength(6))
    recorder.abandon(0)  # after its end this means nothing
    found = sums(meter)
    assert found["time_to_first_token_seconds"] == (1, 2.5)
    assert found["inter_token_latency_seconds"] == (5, 1.25)
    assert found["e2e_request_latency_seconds"] == (1, 3.75)
    assert found["queue_time_seconds"] == (1, 0.5)
    assert found["generation_tokens_histogram"] == (1, 6) and found["num_retractions"] == (1, 2)


def test_an_answer_in_one_piece_takes_the_engines_word_for_its_first_token() -> None:
    meter = RequestMeter()
    add(LatencyRecorder(meter, received_at=100.0), 106.0, 5, STARTED, FinishLength(5))
    found = sums(meter)
    assert found["time_to_first_token_seconds"] == (1, 2.0) and found["inter_token_latency_seconds"] == (4, 4.0)


def test_requests_without_tokens_have_no_pace() -> None:
    meter = RequestMeter()
    add(LatencyRecorder(meter, received_at=100.0), 101.0, 0, STARTED, FinishLength(0))
    add(LatencyRecorder(meter, received_at=100.0), 101.0, 0, None, FinishAbort("too long"))
    LatencyRecorder(meter, received_at=100.0).abandon(0)
    found = {metric.name: numbers for metric, numbers in slices(meter.totals()).items()}
    assert sum(found["time_to_first_token_seconds"]) == 0 and found["generation_tokens_total"] == [0]
    assert found["num_requests_total"] == [3] and found["num_aborted_requests_total"] == [2]
    assert found["prompt_tokens_total"] == [8] and found["cached_tokens_total"] == [3]
