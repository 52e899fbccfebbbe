"""Routing policies: the workers that can take a request in, a choice out. A policy is imported when it is chosen by its
name."""

import inspect
from collections.abc import Sequence
from hashlib import blake2b
from pkgutil import resolve_name
from typing import Any, Protocol, cast

import msgspec

from bough.core.errors import SettingsError

POLICIES = {
    "random": "plain:RandomPolicy",
    "round_robin": "plain:RoundRobinPolicy",
    "power_of_two": "plain:PowerOfTwoPolicy",
    "least_loaded": "plain:LeastLoadedPolicy",
    "consistent_hashing": "plain:ConsistentHashingPolicy",
    "prefix_hash": "plain:PrefixHashPolicy",
    "cost": "cost:CostPolicy",
    "cache_aware": "cache_aware:CacheAwarePolicy",
    "kv_events": "kv_events:KVEventsPolicy",
}


class WorkerView(Protocol):
    """What a policy sees of a worker. `load` counts requests in flight from this gateway process; `reported_load` is
    what the worker last said in /v1/loads."""

    id: str
    url: str
    reported_load: float
    other_load: float  # of the reported load, what other senders have there
    prefill_tokens: float  # of this process's requests there that have no first token yet
    speed: float | None  # prompt tokens that it computes in a second

    @property
    def load(self) -> int: ...


class RoutingRequest(msgspec.Struct, frozen=True, gc=False):
    """The part of a request that routing needs."""

    model: str
    text: str  # the prompt: messages joined; ids as a string of numbers when only ids came
    token_ids: Sequence[int] | None
    session: str | None  # the routing key header (X-SMG-Routing-Key, X-Session-Id)
    target: str | None  # X-SMG-Target-Worker: the id or URL of a worker


class Choice(msgspec.Struct, frozen=True, gc=False):
    """The chosen worker, the share of the prompt (0..1) that it is expected to have cached, and the tokens that are
    left to compute, where the policy counts them."""

    worker_id: str
    expected_cached: float = 0.0
    prefill_tokens: float = 0.0


class Policy:
    """One instance serves one model. It uses neither clock nor socket."""

    def choose(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        """A request that names its worker gets it, and a session stays with its worker, under every policy."""
        named = request.target is not None or request.session is not None
        return self.pick(_allowed(workers, request) if named else workers, request)

    def pick(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        raise NotImplementedError

    def routed(self, worker_id: str, request: RoutingRequest) -> None:
        """The request was sent: the worker is assumed to hold its prefix."""

    def removed(self, worker_id: str) -> None:
        """The worker is gone, and its cache with it."""

    def tick(self, now_s: float) -> None:
        """Called about once a second with a steady clock."""


def ranking(key: str, workers: Sequence[WorkerView]) -> list[WorkerView]:
    """The workers in this key's order, by a hash of both (rendezvous hashing). All gateways agree on it without shared
    state, and a worker that leaves moves only its own keys."""
    digest = blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return sorted(workers, key=lambda w: blake2b(w.url.encode(), digest_size=8, key=digest).digest(), reverse=True)


def _allowed(workers: Sequence[WorkerView], request: RoutingRequest) -> Sequence[WorkerView]:
    """The worker that the request is pinned to, if it can take requests, or all."""
    if request.target is not None:
        named = [worker for worker in workers if request.target in (worker.id, worker.url)]
        if named:
            return named
    return workers if request.session is None else ranking(request.session, workers)[:1]


def build_policy(name: str, /, seed: int | None = None, **options: Any) -> Policy:
    """A policy for one model; `seed` fixes its random choices."""
    if name not in POLICIES:
        raise SettingsError(f"unknown routing policy {name!r}. The known ones are {', '.join(POLICIES)}.")
    made = resolve_name(f"bough.gateway.policies.{POLICIES[name]}")
    if seed is not None and not isinstance(seed, int):
        raise SettingsError(f"the seed of a routing policy is a whole number, got {seed!r}.")
    parameters = inspect.signature(made, eval_str=True).parameters
    known = {option: parameter for option, parameter in parameters.items() if option != "seed"}
    for option, value in options.items():
        if option not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no options"
            raise SettingsError(f"the routing policy {name} has no option {option!r}; it {takes}.")
        try:
            msgspec.convert(value, known[option].annotation)
        except msgspec.ValidationError as error:
            raise SettingsError(f"the option {option} of the routing policy {name}: {error}.") from None
    return cast(Policy, made(**options, **({"seed": seed} if "seed" in parameters else {})))
