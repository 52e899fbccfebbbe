"""Placement by hash, pins and sessions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.errors import SettingsError
from bough.gateway.policies import POLICIES, build_policy, ranking
from tests.fakes.routing import fleet, request, worker

KEYS = [f"session {number}" for number in range(2000)]


def placed(names: str, keys: list[str]) -> dict[str, str]:
    policy = build_policy("consistent_hashing")
    workers = [worker(name) for name in names]
    return {key: policy.choose(workers, request(session=key)).worker_id for key in keys}


def test_keys_spread_evenly() -> None:
    counts = Counter(placed("abcde", KEYS).values())
    assert min(counts.values()) > 330 and max(counts.values()) < 470


@given(names=st.sets(st.sampled_from("abcdefgh"), min_size=2), data=st.data())
@settings(deadline=None, max_examples=30)
def test_only_the_keys_of_a_worker_that_leaves_move(names: set[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(names)))
    before = placed("".join(names), KEYS[:100])
    after = placed("".join(names - {gone}), KEYS[:100])
    assert all(after[key] == before[key] for key in after if before[key] != gone)


def test_the_order_in_which_workers_are_listed_does_not_matter() -> None:
    assert placed("abcd", KEYS[:50]) == placed("dcba", KEYS[:50])


def test_gateways_that_name_workers_differently_agree() -> None:
    ours, theirs = fleet(0, 0, 0), fleet(0, 0, 0)
    renamed = [type(view)(f"w-{view.id}", view.url, 0, 0.0) for view in theirs]
    for key in KEYS[:30]:
        assert ranking(key, ours)[0].url == ranking(key, renamed)[0].url


def test_without_a_session_the_prompt_is_the_key() -> None:
    policy = build_policy("consistent_hashing")
    chosen = {policy.choose(fleet(0, 0, 0), request("the same prompt")).worker_id for _ in range(5)}
    assert len(chosen) == 1


def test_prefix_hash_looks_at_the_beginning_alone() -> None:
    policy = build_policy("prefix_hash", prefix_token_count=10)
    workers = fleet(*[0] * 8)
    assert len({policy.choose(workers, request("s" * 40 + str(n))).worker_id for n in range(20)}) == 1
    assert len({policy.choose(workers, request(str(n) + "s" * 40)).worker_id for n in range(20)}) > 3
    assert len({policy.choose(workers, request("x", ids=[*range(10), n])).worker_id for n in range(20)}) == 1


@given(loads=st.lists(st.integers(0, 300), min_size=1, max_size=12), text=st.text(alphabet="ab", max_size=20))
@settings(deadline=None)
def test_prefix_hash_stays_within_the_load_factor(loads: list[int], text: str) -> None:
    policy = build_policy("prefix_hash")
    workers = fleet(*loads)
    chosen = policy.choose(workers, request(text)).worker_id
    load = next(view.load for view in workers if view.id == chosen)
    assert load < 1.25 * (sum(loads) + 1) / len(loads) + 1


def test_prefix_hash_returns_to_its_worker_when_that_has_room() -> None:
    policy = build_policy("prefix_hash")
    home = policy.choose(fleet(0, 0, 0), request("p")).worker_id
    crowded = [worker(name, 50 if name == home else 0) for name in "abc"]
    assert policy.choose(crowded, request("p")).worker_id != home
    assert policy.choose(fleet(0, 0, 0), request("p")).worker_id == home


def test_prefix_hash_refuses_numbers_below_one() -> None:
    with pytest.raises(SettingsError):
        build_policy("prefix_hash", load_factor=0.9)


@pytest.mark.parametrize("name", POLICIES)
def test_under_every_policy_a_session_stays_and_a_named_worker_is_taken(name: str) -> None:
    policy = build_policy(name, seed=1)
    workers = fleet(9, 0, 4, 0)
    for number in range(10):
        one = request(f"turn {number}", session="s")
        chosen = policy.choose(workers, one).worker_id
        policy.routed(chosen, one)
        assert chosen == ranking("s", workers)[0].id
        assert policy.choose(workers, request(f"{number}", session="s", target="a")).worker_id == "a"
        assert policy.choose(workers, request(f"{number}", target="http://c:30000")).worker_id == "c"
    policy.tick(1.0)
    policy.removed("a")
    assert policy.choose(workers, request(target="gone")).worker_id in "abcd"
