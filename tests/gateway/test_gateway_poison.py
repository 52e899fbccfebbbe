"""Whose fault the failures of a request are."""

from __future__ import annotations

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.breaker import Breaker, BreakerState
from bough.gateway.poison import Faults
from bough.gateway.worker import Lease, Worker


def lease(name: str) -> Lease:
    return Lease(Worker(f"http://{name}", Breaker(GatewaySettings(cb_failure_threshold=1))), lambda: None)


def opened(held: Lease) -> bool:
    return held.worker.breaker.state(0.0) is BreakerState.OPEN


def test_the_same_error_of_two_workers_is_the_requests() -> None:
    faults, first, other, second = Faults(), lease("a"), lease("b"), lease("c")
    for held, status in ((first, 500), (other, 502), (second, 500)):
        assert faults.poison is None
        faults.answered(held, status, "")
    faults.settle()
    assert faults.poison is not None and not any(map(opened, (first, other, second)))


def test_different_errors_are_the_workers() -> None:
    faults, first, second = Faults(), lease("a"), lease("b")
    faults.answered(first, 500, "")
    faults.answered(second, 502, "")
    assert faults.poison is None and not opened(first)
    faults.settle()
    assert opened(first) and opened(second)


def test_one_worker_that_fails_twice_is_to_blame() -> None:
    faults, first = Faults(), lease("a")
    faults.answered(first, 500, "")
    faults.answered(Lease(first.worker, lambda: None), 500, "")
    assert faults.poison is None and opened(first)


def test_unavailable_is_never_the_requests_fault() -> None:
    faults, first, second = Faults(), lease("a"), lease("b")
    faults.answered(first, 503, "")
    faults.answered(second, 503, "")
    assert faults.poison is None and opened(first) and opened(second)


def test_a_request_that_gets_further_on_each_worker_ends_none() -> None:
    faults, first, second = Faults(), lease("a"), lease("b")
    faults.ended(first.worker)
    faults.progressed()
    faults.ended(second.worker)
    assert faults.poison is None
    faults.ended(first.worker)
    assert faults.poison is not None


def test_of_several_requests_on_both_workers_none_is_blamed_before_a_third_ends() -> None:
    """The one that did it and the others look the same."""
    workers = [lease(name).worker for name in "abc"]
    requests = [Faults(), Faults()]
    for number, worker in enumerate(workers, 1):
        for faults in requests:
            faults.sent(worker)
        for faults in requests:
            faults.ended(worker)
            assert (faults.poison is not None) == (number == 3)


def test_a_request_that_alone_was_on_both_workers_is_blamed() -> None:
    first, second = (lease(name).worker for name in "ab")
    guilty, other = Faults(), Faults()
    guilty.sent(first)
    guilty.ended(first)
    for faults in (guilty, other):
        faults.sent(second)
    other.ended(second)
    guilty.ended(second)
    assert guilty.poison is not None and other.poison is None
