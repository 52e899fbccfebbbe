"""Routing policies: which of the workers that can take a request should take it.

A policy sees an immutable snapshot (`interface.py`) and answers with a choice; it owns at most what it remembers of
earlier requests (`TextTree`, `BlockIndex`) and touches no clock and no socket. One instance serves one model, so
nothing here knows model names. Health, limits and the act of sending belong to the rest of the gateway.
"""

from bough.gateway.policies.interface import Choice, Policy, RoutingRequest, WorkerView
from bough.gateway.policies.registry import DEFAULT_POLICY, POLICIES, build_policy

__all__ = ["DEFAULT_POLICY", "POLICIES", "Choice", "Policy", "RoutingRequest", "WorkerView", "build_policy"]
