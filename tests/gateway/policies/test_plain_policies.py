"""Policies that look at load alone, and the table that builds them."""

from __future__ import annotations

from collections import Counter

import pytest

from bough.core.errors import SettingsError
from bough.gateway.policies import build_policy
from tests.fakes.routing import fleet, request, worker


def test_an_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"'fastest'.*random, round_robin"):
        build_policy("fastest")


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(SettingsError, match=r"round_robin has no option 'threshold'; it takes no options"):
        build_policy("round_robin", threshold=1)


def test_round_robin_takes_turns() -> None:
    policy = build_policy("round_robin")
    chosen = [policy.choose(fleet(0, 9, 0), request()).worker_id for _ in range(7)]
    assert chosen == list("abcabca")


def test_round_robin_keeps_its_turn_when_workers_come_and_go() -> None:
    policy = build_policy("round_robin")
    a, b, c, d = fleet(0, 0, 0, 0)
    assert policy.choose([a, b, d], request()).worker_id == "a"
    assert policy.choose([a, b, d], request()).worker_id == "b"
    assert policy.choose([a, c, d], request()).worker_id == "c"
    assert policy.choose([a, b], request()).worker_id == "a"


def test_random_reaches_everyone_and_a_seed_repeats_it() -> None:
    policies = [build_policy("random", seed=3) for _ in range(2)]
    first, second = ([p.choose(fleet(0, 50, 0), request()).worker_id for _ in range(300)] for p in policies)
    assert first == second
    assert min(Counter(first).values()) > 60


def test_the_least_loaded_is_chosen() -> None:
    policy = build_policy("least_loaded", seed=0)
    assert policy.choose(fleet(4, 2, 7), request()).worker_id == "b"


def test_level_workers_are_told_apart_by_what_they_report_and_then_by_chance() -> None:
    policy = build_policy("least_loaded", seed=0)
    unequal = [worker("a", 1, reported=300.0), worker("b", 1, reported=20.0), worker("c", 2)]
    assert policy.choose(unequal, request()).worker_id == "b"
    drawn = Counter(policy.choose(fleet(0, 0, 0), request()).worker_id for _ in range(300))
    assert set(drawn) == {"a", "b", "c"} and min(drawn.values()) > 60


def test_power_of_two_never_takes_the_busiest_of_three() -> None:
    policy = build_policy("power_of_two", seed=0)
    drawn = Counter(policy.choose(fleet(0, 3, 8), request()).worker_id for _ in range(200))
    assert set(drawn) == {"a", "b"}
    assert drawn["a"] > drawn["b"]


@pytest.mark.parametrize("name", ["random", "round_robin", "power_of_two", "least_loaded"])
def test_one_worker_is_enough(name: str) -> None:
    policy = build_policy(name, seed=0)
    assert policy.choose(fleet(5), request()).worker_id == "a"
