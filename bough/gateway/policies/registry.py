"""The policies by name, and how one is built. Nothing of a policy is imported before it is chosen."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, cast

from bough.core.errors import SettingsError
from bough.gateway.policies.interface import Policy
from bough.gateway.policies.pinning import PinningPolicy

DEFAULT_POLICY = "cache_aware"
POLICIES: dict[str, tuple[str, str]] = {
    "random": ("bough.gateway.policies.plain", "RandomPolicy"),
    "round_robin": ("bough.gateway.policies.plain", "RoundRobinPolicy"),
    "power_of_two": ("bough.gateway.policies.plain", "PowerOfTwoPolicy"),
    "least_loaded": ("bough.gateway.policies.plain", "LeastLoadedPolicy"),
    "consistent_hashing": ("bough.gateway.policies.hashing", "ConsistentHashingPolicy"),
    "prefix_hash": ("bough.gateway.policies.hashing", "PrefixHashPolicy"),
    "cache_aware": ("bough.gateway.policies.cache_aware", "CacheAwarePolicy"),
    "kv_events": ("bough.gateway.policies.kv_events", "KVEventsPolicy"),
}


def build_policy(name: str, seed: int | None = None, **options: Any) -> PinningPolicy:
    """The policy of that name, under the pins that hold for all: one instance per model.

    `seed` fixes its random choices; `options` are its own, and an unknown one lists those that it takes.
    """
    if name not in POLICIES:
        raise SettingsError(f"unknown routing policy {name!r}. The known ones are {', '.join(POLICIES)}.")
    module, attribute = POLICIES[name]
    made = getattr(importlib.import_module(module), attribute)
    takes_seed = "seed" in inspect.signature(made).parameters
    known = [option for option in inspect.signature(made).parameters if option != "seed"]
    for option in options:
        if option not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no options"
            raise SettingsError(f"the routing policy {name} has no option {option!r}; it {takes}.")
    return PinningPolicy(cast(Policy, made(**options, **({"seed": seed} if takes_seed else {}))))
