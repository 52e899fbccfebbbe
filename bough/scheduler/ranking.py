"""Applies the queue's policy to the live queue: builds the snapshot that `policy` orders, and nothing more than that.

Owns the policy's name, its random numbers and which way priorities point. The decisions themselves are pure functions
in `policy`.
"""

from __future__ import annotations

import random

from bough.core.settings import SchedulerSettings
from bough.memory.tree import Node, RadixTree
from bough.scheduler.policy import Waiting, affordable, order
from bough.scheduler.request import Request
from bough.scheduler.waiting_queue import WaitingQueue

NO_PATH: tuple[int, ...] = ()


class Ranking:
    def __init__(self, settings: SchedulerSettings, tree: RadixTree, seed: int) -> None:
        self._policy = "priority" if settings.enable_priority_scheduling else settings.schedule_policy
        self._sign = -1 if settings.schedule_low_priority_values_first else 1
        self._tree = tree
        self._rng = random.Random(seed)

    @property
    def by_priority(self) -> bool:
        return self._policy == "priority"

    def urgency(self, request: Request) -> int:
        return self._sign * request.priority if self.by_priority else 0

    def ordered(self, queue: WaitingQueue) -> list[Request]:
        """The waiting requests, first to run first."""
        waiting = queue.snapshot()
        policy = affordable(self._policy, len(waiting))
        if policy == "fcfs" or len(waiting) <= 1:
            return waiting
        return [waiting[i] for i in order(policy, self._snapshot(policy, waiting), self._rng)]

    def _snapshot(self, policy: str, waiting: list[Request]) -> list[Waiting]:
        """What the policy may look at; the tree is asked only where it does."""
        prefixes, paths = [0] * len(waiting), [NO_PATH] * len(waiting)
        if policy == "lpm":
            prefixes = [self._tree.match_length(r.tokens[: r.match_cap], r.namespace) for r in waiting]
        elif policy == "dfs-weight":
            # All are matched before any path is read: a match may split a node on the path of another.
            nodes = [self._tree.match(r.tokens[: r.match_cap], r.namespace, touch=False).node for r in waiting]
            paths = [_path_to(node) for node in nodes]
        return [
            Waiting(r.arrival, self.urgency(r), r.max_new, prefix, path)
            for r, prefix, path in zip(waiting, prefixes, paths, strict=True)
        ]


def _path_to(node: Node | None) -> tuple[int, ...]:
    """Names of the nodes from the root's child down to `node`."""
    path: list[int] = []
    while node is not None and node.parent is not None:
        path.append(id(node))
        node = node.parent
    return tuple(reversed(path))
