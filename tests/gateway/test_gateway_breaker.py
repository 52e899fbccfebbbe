"""The circuit breaker as a table: what happens, and in which state that leaves it."""

from __future__ import annotations

import pytest

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.breaker import Breaker, BreakerState

SETTINGS = GatewaySettings(
    cb_failure_threshold=3,
    cb_success_threshold=2,
    cb_timeout_duration_secs=10.0,
    cb_window_duration_secs=30.0,
)
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN

TABLE = [
    ("new", "", 0, CLOSED),
    ("below the threshold", "f f", 0, CLOSED),
    ("at the threshold", "f f f", 0, OPEN),
    ("a success between", "f f s f f", 0, CLOSED),
    ("just before the time is up", "f f f", 9.9, OPEN),
    ("when it is up", "f f f", 10, HALF_OPEN),
    ("one success on trial", "f f f +10 b s", 0, HALF_OPEN),
    ("enough of them", "f f f +10 b s b s", 0, CLOSED),
    ("a failure on trial", "f f f +10 b f", 0, OPEN),
    ("a failure on trial opens it for the whole time", "f f f +10 b f", 9.9, OPEN),
    ("the count begins anew after a failed trial", "f f f +10 b s b f +10 b s", 0, HALF_OPEN),
    ("failures far apart", "f f +31 f f", 0, CLOSED),
    ("a trial that tells nothing", "f f f +10 b a", 0, HALF_OPEN),
    ("a stream on trial counts at its first event", "f f f +10 b p b p", 0, CLOSED),
    ("a stream that is no trial does not", "f f p f", 0, OPEN),
    ("a reset", "f f f r", 0, CLOSED),
]


def play(steps: str) -> tuple[Breaker, float]:
    breaker, now_s = Breaker(SETTINGS), 100.0
    for step in steps.split():
        match step:
            case "f":
                breaker.failed(now_s)
            case "s":
                breaker.succeeded()
            case "b":
                breaker.begin(now_s)
            case "p":
                breaker.proved()
            case "a":
                breaker.abandoned()
            case "r":
                breaker.reset()
            case _:
                now_s += float(step)
    return breaker, now_s


@pytest.mark.parametrize(("about", "steps", "later_s", "expected"), TABLE, ids=[row[0] for row in TABLE])
def test_states(about: str, steps: str, later_s: float, expected: BreakerState) -> None:
    breaker, now_s = play(steps)
    assert breaker.state(now_s + later_s) is expected


def test_an_open_one_admits_nobody_and_a_half_open_one_a_single_trial() -> None:
    breaker, now_s = play("f f f")
    assert not breaker.admits(now_s)
    assert breaker.admits(now_s + 10)
    breaker.begin(now_s + 10)
    assert not breaker.admits(now_s + 10)
    breaker.abandoned()
    assert breaker.admits(now_s + 10)
