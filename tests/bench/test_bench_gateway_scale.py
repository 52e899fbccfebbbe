"""The gateway's own work, measured with few workers."""

from __future__ import annotations

import pytest

from tests.bench.gateway import LOADS, LoadOptions
from tests.bench.gateway_scale import MODEL, Fleet, as_text, measure_scale

SMALL = LoadOptions(requests=40, system_prompts=4, system_tokens=64, question_tokens=16)


@pytest.mark.parametrize("policy", ["round_robin", "cost", "cache_aware"])
def test_every_request_is_routed(policy: str) -> None:
    result = measure_scale(policy, 5, LOADS["shared-prefix"](SMALL), users=8)
    assert (result["workers"], result["requests"]) == (5, 40)
    assert 1.0 <= result["requests_imbalance"] <= 5.0
    assert result["metrics_page_kib"] > 1.0 and result["routing_us"] > 0.0
    assert f"policy {policy}, workers 5" in as_text(result)


def test_workers_that_get_requests_are_remembered_until_one_changes() -> None:
    registry = Fleet.of("cost", 3).registry
    first, second, third = registry.available(MODEL)
    assert registry.available(MODEL) is registry.available(MODEL)
    registry.leave_rotation(first, "a test")
    assert registry.available(MODEL) == [second, third]
    registry.drain(second)
    assert registry.available(MODEL) == [third] == registry.available("other")  # workers of one model decide on names
    registry.enter_rotation(first)
    registry.remove(third)
    assert registry.available(MODEL) == [first] == registry.available(None)


def test_names_of_models_do_not_fill_the_memory() -> None:
    registry = Fleet.of("cost", 1).registry
    for number in range(1000):
        registry.available(f"model-{number}")
    assert len(registry._available) <= 256
