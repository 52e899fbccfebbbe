"""The routing policy of each model, which may be changed while requests run.

Only models that workers have reported have a policy of their own; all other names share one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.policies import Policy, build_policy
from bough.gateway.registry import RegistryListener
from bough.gateway.worker import Worker


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    name: str
    options: dict[str, Any] = field(default_factory=dict)


def default_choice(settings: GatewaySettings) -> PolicyChoice:
    return PolicyChoice(settings.default_policy, settings.options_of(settings.default_policy))


class PolicyTable(RegistryListener):
    """Listens to the registry: what a policy remembers of a worker goes with it."""

    def __init__(self, default: PolicyChoice, is_served: Callable[[str], bool] = lambda model: True) -> None:
        build_policy(default.name, **default.options)  # an unknown name must be known at start
        self.default = default
        self._is_served = is_served
        self.chosen: dict[str, PolicyChoice] = {}
        self._policies: dict[str | None, Policy] = {}
        # For those who feed policies.
        self.on_built: Callable[[str | None, Policy], None] = lambda model, policy: None
        self.on_dropped: Callable[[str | None], None] = lambda model: None

    def of(self, model: str | None) -> Policy:
        policy = self._policies.get(model)
        if policy is None and not self._has_own(model):
            return self.of(None)
        if policy is None:
            choice = self.default if model is None else self.chosen.get(model, self.default)
            policy = self._policies[model] = build_policy(choice.name, **choice.options)
            self.on_built(model, policy)
        return policy

    def choose(self, model: str, choice: PolicyChoice) -> None:
        """An unknown name is an error and changes nothing."""
        if self.chosen.get(model) == choice:
            return
        policy = build_policy(choice.name, **choice.options)
        self.chosen[model] = choice
        self._policies[model] = policy
        self.on_built(model, policy)

    def set_default(self, choice: PolicyChoice) -> None:
        build_policy(choice.name, **choice.options)
        if choice == self.default:
            return
        self.default = choice
        self._policies = {model: policy for model, policy in self._policies.items() if model in self.chosen}

    def forget(self, model: str) -> None:
        if self.chosen.pop(model, None) is not None:
            self._policies.pop(model, None)

    def shown(self) -> dict[str, Any]:
        models = {model: choice.name for model, choice in self.chosen.items()}
        return {"default": self.default.name, "models": models}

    def tick(self, now_s: float) -> None:
        for policy in self._policies.values():
            policy.tick(now_s)

    def changed(self, worker: Worker) -> None:
        """Builds policies before the first request: they may have much to learn of a running worker."""
        if worker.in_rotation:
            for model in worker.capabilities.models:
                self.of(model)
        self._drop_unserved()

    def removed(self, worker: Worker) -> None:
        for policy in self._policies.values():
            policy.removed(worker.id)
        self._drop_unserved()

    def _has_own(self, model: str | None) -> bool:
        return model is None or model in self.chosen or self._is_served(model)

    def _drop_unserved(self) -> None:
        for model in [model for model in self._policies if not self._has_own(model)]:
            del self._policies[model]
            self.on_dropped(model)
