"""Routing policies by name. A policy is imported when it is chosen."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, cast

import msgspec

from bough.core.errors import SettingsError
from bough.gateway.policies.interface import Choice, Policy, RoutingRequest, WorkerView

__all__ = ["POLICIES", "Choice", "Policy", "RoutingRequest", "WorkerView", "build_policy"]

POLICIES: dict[str, tuple[str, str]] = {
    "random": ("bough.gateway.policies.plain", "RandomPolicy"),
    "round_robin": ("bough.gateway.policies.plain", "RoundRobinPolicy"),
    "power_of_two": ("bough.gateway.policies.plain", "PowerOfTwoPolicy"),
    "least_loaded": ("bough.gateway.policies.plain", "LeastLoadedPolicy"),
    "consistent_hashing": ("bough.gateway.policies.plain", "ConsistentHashingPolicy"),
    "prefix_hash": ("bough.gateway.policies.plain", "PrefixHashPolicy"),
    "cache_aware": ("bough.gateway.policies.cache_aware", "CacheAwarePolicy"),
    "kv_events": ("bough.gateway.policies.kv_events", "KVEventsPolicy"),
}


def build_policy(name: str, /, seed: int | None = None, **options: Any) -> Policy:
    """A policy for one model; `seed` fixes its random choices."""
    if name not in POLICIES:
        raise SettingsError(f"unknown routing policy {name!r}. The known ones are {', '.join(POLICIES)}.")
    module, attribute = POLICIES[name]
    made = getattr(importlib.import_module(module), attribute)
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
