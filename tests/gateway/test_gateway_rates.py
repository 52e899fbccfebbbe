"""Token buckets, backoff and the retry budget, on a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.clients import ClientKey, Clients, TokenBucket, take_from_all
from bough.gateway.proxy import BUDGET_FLOOR_PER_S, BUDGET_RESERVE, pause_s
from bough.server.errors import HttpError


def test_a_bucket_lets_a_burst_pass_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=2.0, burst=3.0)
    assert [take_from_all([bucket], 0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert take_from_all([bucket], 0.25) == 0.25
    assert take_from_all([bucket], 0.5) == 0.0
    assert take_from_all([bucket], 100.0) == 0.0


def test_a_refusal_by_one_bucket_takes_nothing_from_the_others() -> None:
    wide, narrow = TokenBucket(10.0, 10.0), TokenBucket(1.0, 1.0)
    assert take_from_all([wide, narrow], 0.0) == 0.0
    for _ in range(20):
        assert take_from_all([wide, narrow], 0.0) > 0.0
    assert [take_from_all([wide], 0.0) for _ in range(10)] == [0.0] * 9 + [pytest.approx(0.1)]


@given(st.lists(st.floats(0.0, 2.0), max_size=60), st.floats(0.5, 20.0), st.floats(1.0, 10.0))
def test_never_more_than_burst_and_rate_pass(gaps: list[float], rate: float, burst: float) -> None:
    bucket, now_s, passed = TokenBucket(rate, burst), 0.0, 0
    for gap in gaps:
        now_s += gap
        passed += take_from_all([bucket], now_s) == 0.0
    assert passed <= bucket.burst + rate * now_s + 1e-6


def test_every_client_has_its_own_rate() -> None:
    clients = Clients(GatewaySettings(), [ClientKey("a", "a", 1.0, 1.0), ClientKey("b", "b")])
    first, second = (clients.identify("api", [(b"x-api-key", key)]) for key in (b"a", b"b"))
    clients.count(first, 0.0)
    with pytest.raises(HttpError) as refusal:
        clients.count(first, 0.0)
    assert refusal.value.failure.status == 429 and refusal.value.failure.headers["Retry-After"] == "1"
    for _ in range(10):
        clients.count(second, 0.0)


@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_pauses_grow_up_to_a_limit_and_are_spread(retry: int, chance: float) -> None:
    settings = GatewaySettings(
        retry_initial_backoff_ms=50.0,
        retry_max_backoff_ms=30_000.0,
        retry_backoff_multiplier=1.5,
        retry_jitter_factor=0.2,
    )
    pause = pause_s(settings, retry, chance)
    assert 0.8 * min(30.0, 0.05 * 1.5 ** min(retry, 100)) <= pause + 1e-9
    assert pause <= 30.0 * 1.2
    assert pause_s(settings, retry, 0.5) <= pause_s(settings, retry + 1, 0.5)


def test_a_budget_ends_a_storm_and_recovers() -> None:
    budget = TokenBucket(BUDGET_FLOOR_PER_S, BUDGET_RESERVE)
    allowed = sum(not take_from_all([budget], 0.0) for _ in range(1000))
    assert allowed == BUDGET_RESERVE
    for _ in range(8):
        budget.add(0.25)
    assert [not take_from_all([budget], 0.0) for _ in range(3)] == [True, True, False]
    assert not take_from_all([budget], 1.0)
