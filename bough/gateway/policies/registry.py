"""The policies by name, and how one is built. Nothing of a policy is imported before it is chosen."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, cast

from bough.core.errors import SettingsError
from bough.gateway.policies.interface import Policy

DEFAULT_POLICY = "cache_aware"
POLICIES: dict[str, tuple[str, str]] = {
    "random": ("bough.gateway.policies.plain", "RandomPolicy"),
    "round_robin": ("bough.gateway.policies.plain", "RoundRobinPolicy"),
    "power_of_two": ("bough.gateway.policies.plain", "PowerOfTwoPolicy"),
    "least_loaded": ("bough.gateway.policies.plain", "LeastLoadedPolicy"),
}


def build_policy(name: str, seed: int | None = None, **options: Any) -> Policy:
    """The policy of that name; one instance per model. `seed` fixes its random choices, `options` are its own."""
    if name not in POLICIES:
        raise SettingsError(f"unknown routing policy {name!r}. The known ones are {', '.join(POLICIES)}.")
    module, attribute = POLICIES[name]
    made = getattr(importlib.import_module(module), attribute)
    known = [option for option in inspect.signature(made).parameters if option != "seed"]
    for option in options:
        if option not in known:
            takes = f"takes {', '.join(known)}" if known else "takes no options"
            raise SettingsError(f"the routing policy {name} has no option {option!r}; it {takes}.")
    return cast(Policy, made(seed=seed, **options))
