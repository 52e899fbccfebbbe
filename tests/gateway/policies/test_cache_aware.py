"""Routing by the text that workers were sent before."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.errors import SettingsError
from bough.gateway.policies import build_policy
from bough.gateway.policies.cache_aware import CacheAwarePolicy
from bough.gateway.policies.kv_events import KVEventsPolicy
from tests.fakes.routing import fleet, request
from tests.fakes.text_trees import check, size

PROMPT = "You are a helpful assistant. " * 10


def test_the_worker_with_the_longest_prefix_is_chosen() -> None:
    policy = build_policy("cache_aware", seed=0)
    policy.routed("b", request(PROMPT))
    policy.routed("c", request(PROMPT[:150]))
    choice = policy.choose(fleet(0, 5, 0), request(PROMPT + "x" * len(PROMPT)))
    assert (choice.worker_id, choice.expected_cached) == ("b", 0.5)


def test_a_short_match_does_not_count() -> None:
    policy = build_policy("cache_aware", seed=0)
    policy.routed("b", request("abc" + "d" * 97))
    choice = policy.choose(fleet(1, 1, 0), request("abc" + "e" * 7))
    assert choice.worker_id == "c"
    policy = build_policy("cache_aware", cache_threshold=0.2, seed=0)
    policy.routed("b", request("abc" + "d" * 97))
    assert policy.choose(fleet(1, 1, 0), request("abc" + "e" * 7)).worker_id == "b"


def test_of_two_that_hold_the_same_the_less_loaded_is_chosen() -> None:
    policy = build_policy("cache_aware", seed=0)
    policy.routed("a", request(PROMPT))
    policy.routed("c", request(PROMPT))
    assert policy.choose(fleet(3, 0, 2), request(PROMPT)).worker_id == "c"


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ((64, 0, 10), "a"),  # not more than 64 apart
        ((65, 0, 10), "b"),  # far apart in number and proportion
        ((300, 200, 250), "a"),  # 1.5 times and no more
        ((301, 200, 250), "b"),
    ],
)
def test_loads_decide_when_they_are_far_apart(loads: tuple[int, ...], chosen: str) -> None:
    policy = build_policy("cache_aware", seed=0)
    policy.routed("a", request(PROMPT))
    assert policy.choose(fleet(*loads), request(PROMPT)).worker_id == chosen


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ((8, 0, 0), "a"),  # a few more than the mean are nothing
        ((21, 3, 0), "b"),  # 1.5 × 8 + 8 and one more: the next best holder
        ((20, 4, 0), "a"),
        ((40, 20, 0), "b"),
        ((50, 50, 1, 0, 1), "d"),
    ],
)
def test_a_load_factor_passes_over_the_crowded(loads: tuple[int, ...], chosen: str) -> None:
    policy = build_policy("cache_aware", seed=0, max_load_factor=1.5)
    policy.routed("a", request(PROMPT))
    policy.routed("b", request(PROMPT[:200]))
    assert policy.choose(fleet(*loads), request(PROMPT)).worker_id == chosen


def test_a_hot_prefix_spreads_and_is_then_shared_by_its_holders() -> None:
    policy = build_policy("cache_aware", seed=0)
    loads = [0, 0, 0, 0]
    for number in range(600):
        chosen = policy.choose(fleet(*loads), request(PROMPT + str(number))).worker_id
        policy.routed(chosen, request(PROMPT + str(number)))
        loads["abcd".index(chosen)] += 1
    assert max(loads) - min(loads) <= 66


def test_a_worker_that_left_is_forgotten() -> None:
    policy = build_policy("cache_aware", seed=0)
    policy.routed("b", request(PROMPT))
    policy.removed("b")
    assert policy.choose(fleet(0, 1, 1), request(PROMPT)).worker_id == "a"


def test_an_absent_holder_leaves_the_choice_to_the_next_best() -> None:
    policy = build_policy("cache_aware", seed=0)
    policy.routed("z", request(PROMPT))
    policy.routed("b", request(PROMPT[:200]))
    choice = policy.choose(fleet(0, 3), request(PROMPT))
    assert choice.worker_id == "b" and choice.expected_cached == pytest.approx(200 / len(PROMPT))


def test_every_minute_the_tree_is_cut_to_its_size() -> None:
    policy = build_policy("cache_aware", max_tree_size=100, seed=0)
    policy.tick(1000.0)
    policy.routed("b", request("x" * 90))
    policy.routed("b", request(PROMPT[:90]))
    policy.tick(1059.0)
    assert policy.choose(fleet(0, 1), request("x" * 90)).worker_id == "b"
    policy.tick(1060.0)
    assert policy.choose(fleet(0, 1), request("x" * 90)).worker_id == "a"
    assert policy.choose(fleet(0, 1), request(PROMPT[:90])).worker_id == "b"


@pytest.mark.parametrize("kind", [CacheAwarePolicy, KVEventsPolicy])
def test_a_burst_does_not_grow_the_tree_beyond_twice_its_size(kind: type[CacheAwarePolicy]) -> None:
    policy = kind(max_tree_size=1000, seed=0)
    tree = policy._sent
    policy.tick(1000.0)
    largest = 0
    for number in range(500):  # no tick: less than a second has passed
        policy.routed("ab"[number % 2], request(f"{number} " * 20))
        largest = max(largest, size(tree, "a"), size(tree, "b"))
    check(tree)
    assert 1000 < largest <= 2000
    assert tree.match("499 " * 20)["b"] == 80 and tree.match("7 " * 20).get("b", 0) < 10


def test_an_empty_prompt_goes_to_the_least_loaded() -> None:
    policy = build_policy("cache_aware", seed=0)
    policy.routed("a", request(""))
    assert policy.choose(fleet(1, 0), request("")).worker_id == "b"


@pytest.mark.parametrize(
    "options",
    [
        {"cache_threshold": 2.0},
        {"balance_abs_threshold": -1},
        {"balance_rel_threshold": 0.5},
        {"max_load_factor": 0.9},
    ],
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        build_policy("cache_aware", **options)


@given(texts=st.lists(st.text(alphabet="ab", max_size=8), min_size=1, max_size=60), loads=st.lists(st.integers(0, 200)))
@settings(deadline=None)
def test_any_load_gets_a_worker_that_exists(texts: list[str], loads: list[int]) -> None:
    policy = build_policy("cache_aware", seed=0)
    workers = fleet(*(loads[:20] or [0]))
    chosen: Counter[str] = Counter()
    for text in texts:
        choice = policy.choose(workers, request(text))
        policy.routed(choice.worker_id, request(text))
        chosen[choice.worker_id] += 1
        assert 0.0 <= choice.expected_cached <= 1.0
    assert chosen.keys() <= {worker.id for worker in workers}
