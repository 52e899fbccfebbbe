"""Routing by what a worker would have to compute, and what is queued there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from bough.core.errors import SettingsError
from bough.gateway.policies import Policy, WorkerView, build_policy
from tests.fakes.routing import Snapshot, fleet, request

LONG = "You are a helpful assistant with a long history. " * 200  # some 2,400 tokens


def seen(name: str, **figures: Any) -> WorkerView:
    return Snapshot(**{"id": name, "url": f"http://{name}", "load": 0, "reported_load": 0.0, **figures})


def chosen(workers: Sequence[WorkerView], text: str = "hello", **options: Any) -> str:
    """Where a request goes; worker `a` holds LONG."""
    policy = build_policy("cost", seed=0, **options)
    policy.routed("a", request(LONG))
    return policy.choose(workers, request(text)).worker_id


def test_short_prompts_that_begin_alike_go_to_each_worker_in_turn() -> None:
    policy = build_policy("cost", seed=0)
    counts: Counter[str] = Counter()
    for number in range(100):
        ask = request(f"question {number}")
        choice = policy.choose(fleet(0, 0, 0, 0), ask)
        policy.routed(choice.worker_id, ask)
        counts[choice.worker_id] += 1
    assert sorted(counts.values()) == [25, 25, 25, 25]


def test_a_long_history_stays_and_its_tokens_are_counted() -> None:
    policy = build_policy("cost", seed=0)
    policy.routed("a", request(LONG))
    choice = policy.choose(fleet(6, 4), request(LONG + "x" * 400))
    assert choice.worker_id == "a" and choice.prefill_tokens == pytest.approx(100)
    assert policy.choose(fleet(0, 0), request("x", ids=[7] * 50)).prefill_tokens == 50


def test_a_short_common_beginning_spreads_as_soon_as_a_few_requests_run() -> None:
    system = "You are helpful. " * 20  # 85 tokens
    policy = build_policy("cost", seed=0)
    policy.routed("a", request(system))
    assert policy.choose(fleet(0, 0), request(system)).worker_id == "a"
    assert policy.choose(fleet(2, 0), request(system)).worker_id == "b"


@pytest.mark.parametrize(
    "busy",
    [
        {"load": 2},
        {"other_load": 2.0},  # what other gateways, or other processes of this one, have sent
        {"prefill_tokens": 300.0},  # prompts that wait for their first token
        {"speed": 500.0},
    ],
)
def test_what_keeps_a_worker_busy_counts(busy: dict[str, float]) -> None:
    figures = {"speed": 2000.0, **busy}
    assert chosen([seen("b", **figures), seen("c", speed=2000.0)], "x" * 1200) == "c"


def test_speeds_that_are_nearly_the_same_are_the_same() -> None:
    policy = build_policy("cost", seed=0)
    workers = [seen("b", speed=1000.0), seen("c", speed=1100.0), seen("d")]
    assert {policy.choose(workers, request("x" * 4000)).worker_id for _ in range(3)} == {"b", "c", "d"}


@pytest.mark.parametrize(("loads", "taken"), [((16, 6), "a"), ((16, 2), "b")])
def test_a_worker_with_next_to_nothing_to_do_gets_what_it_has_not_cached(loads: tuple[int, ...], taken: str) -> None:
    assert chosen(fleet(*loads), LONG) == taken


def test_processes_that_do_not_know_a_prompt_agree_on_its_worker() -> None:
    texts = [f"{number} " + "x" * 4000 for number in range(20)]
    first, second = ([chosen(fleet(0, 0, 0, 0), text, home_share=0.5) for text in texts] for _ in range(2))
    assert first == second and len(set(first)) == 4
    assert chosen(fleet(0, 0, 0, 0), LONG + "x", home_share=0.5) == "a"  # what is known counts more than the hash


def test_a_worker_that_left_is_forgotten() -> None:
    policy = build_policy("cost", seed=0)
    policy.routed("b", request(LONG))
    policy.removed("b")
    assert policy.choose(fleet(0, 0), request(LONG)).expected_cached == 0.0


@pytest.mark.parametrize("options", [{"cache_weight": 0.5}, {"request_tokens": -1.0}, {"home_share": 1.5}])
def test_numbers_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        build_policy("cost", **options)


def test_a_worker_that_has_just_joined_gets_what_the_others_hold() -> None:
    policy = build_policy("cost", seed=0)
    for name in "abc":
        policy.routed(name, request(f"{name} {LONG}"))
    assert policy.choose(fleet(9, 9, 9, 0), request(f"a {LONG}")).worker_id == "d"


def test_a_worker_in_a_quiet_moment_gets_only_what_is_hot() -> None:
    policy = build_policy("cost", seed=0)
    for name in "abcd":
        policy.routed(name, request(f"{name} {LONG}"))
    assert policy.choose(fleet(9, 9, 9, 0), request(f"a {LONG}")).worker_id == "a"
    assert policy.choose(fleet(27, 9, 9, 0), request(f"a {LONG}")).worker_id == "d"  # all that hold it are busy
    for name in "ab":
        policy.routed(name, request(f"shared {LONG}"))
    assert policy.choose(fleet(9, 9, 9, 0), request(f"shared {LONG}")).worker_id == "d"  # many hold it
    assert policy.choose(fleet(9, 9, 9, 0), request(f"new {LONG}")).worker_id == "d"  # nobody holds it


def warm(*names: str) -> Policy:
    """A policy that has sent each worker as much, and to `a` alone what begins with a part of LONG."""
    policy = build_policy("cost", seed=0)
    for name in names:
        policy.routed(name, request(LONG if name == "a" else f"{name} {LONG}"))
    return policy


@pytest.mark.parametrize("speed", [None, 400.0, 20_000.0])
def test_what_is_cached_stays_there_from_the_first_prompt_on(speed: float | None) -> None:
    """A few requests more are no reason for a copy, and nothing is known of the workers' speed at first."""
    workers = [seen("a", load=4, speed=speed), seen("b", speed=speed)]
    assert warm("a", "b").choose(workers, request(LONG[:800])).worker_id == "a"


def test_what_one_of_two_workers_holds_is_hot_only_if_most_prompts_begin_with_it() -> None:
    policy = warm("a", "b")
    taken = [policy.choose(fleet(8, 0), request(LONG)).worker_id for _ in range(6)]
    assert taken == ["a", "a", "a", "a", "b", "b"]  # the first few do not tell
    for number in range(10):
        policy.choose(fleet(0, 0), request(f"{number} {LONG}"))
    assert policy.choose(fleet(8, 0), request(LONG)).worker_id == "a"


@pytest.mark.parametrize(("speed", "taken"), [(20_000.0, "b"), (400.0, "a")])
def test_a_prompt_that_slow_workers_compute_for_long_stays_longer(speed: float, taken: str) -> None:
    """What a GPU computes in one step takes a CPU half a second."""
    workers = [seen("a", load=4, speed=speed), seen("b", speed=speed)]
    assert chosen(workers, LONG[:800]) == taken
