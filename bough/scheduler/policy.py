"""The order of the waiting queue, and which running request gives way: pure functions from a snapshot to an order, and
`Ranking`, which takes the snapshot of the live queue.

`fcfs` by arrival; `priority` by urgency, then arrival; `lof` longest output first; `lpm` longest cached prefix first;
`dfs-weight` walks the tree depth first, the branches with most waiting requests first, so that requests of one branch
run together; `random` shuffles.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bough.core.settings import SchedulerSettings
from bough.memory.tree.node import path_to
from bough.memory.tree.tree import RadixTree
from bough.scheduler.request import Request
from bough.scheduler.waiting_queue import WaitingQueue

LARGEST_FIRST = {"lpm": "prefix", "lof": "max_new", "priority": "urgency"}
LPM_QUEUE_LIMIT = 128  # matching every waiting prompt each step costs more than the better order brings


@dataclass(frozen=True, slots=True)
class Waiting:
    """What an order may depend on. `path` names the tree nodes that the prompt's cached prefix runs through."""

    arrival: int
    urgency: int = 0  # larger goes first
    max_new: int = 0
    prefix: int = 0
    path: tuple[int, ...] = ()


def affordable(policy: str, queued: int) -> str:
    return "fcfs" if policy == "lpm" and queued > LPM_QUEUE_LIMIT else policy


def order(policy: str, waiting: Sequence[Waiting], rng: random.Random) -> list[int]:
    """Indices into `waiting`, first to run first. Ties go by arrival."""
    indices = list(range(len(waiting)))
    if policy == "random":
        rng.shuffle(indices)
        return indices
    if policy == "dfs-weight":
        weight = Counter(node for w in waiting for node in w.path)
        # A depth-first walk: at each level the heavier branch first, equal ones kept apart.
        walk = [tuple((-weight[node], node) for node in w.path) for w in waiting]
        return sorted(indices, key=lambda i: (walk[i], waiting[i].arrival))
    field = LARGEST_FIRST.get(policy)
    return sorted(indices, key=lambda i: (0 if field is None else -getattr(waiting[i], field), waiting[i].arrival))


@dataclass(frozen=True, slots=True)
class Running:
    row: int
    generated: int
    prompt_len: int
    arrival: int
    urgency: int = 0


def retraction_order(running: Sequence[Running]) -> list[int]:
    """Rows in the order in which they give way when memory runs out: least output first (least work is lost), and of
    those the longest prompt first (most memory is won), and of equals the youngest. Less urgent requests before more
    urgent ones."""
    return [r.row for r in sorted(running, key=lambda r: (r.urgency, r.generated, -r.prompt_len, -r.arrival))]


def preemption_order(running: Sequence[Running], urgency: int, threshold: int) -> list[int]:
    """Rows that must give way to a request of this urgency, if it cannot start otherwise."""
    return retraction_order([r for r in running if urgency - r.urgency > threshold])


class Ranking:
    """Owns the policy's name, its random numbers and which way priorities point."""

    def __init__(self, settings: SchedulerSettings, tree: RadixTree, seed: int) -> None:
        self._policy = "priority" if settings.enable_priority_scheduling else settings.schedule_policy
        self.by_priority = self._policy == "priority"
        self._sign = -1 if settings.schedule_low_priority_values_first else 1
        self._tree = tree
        self._rng = random.Random(seed)
        self._moves, self._found = 0, dict[Request, tuple[int, tuple[int, ...]]]()  # prefixes and paths at that time

    def urgency(self, request: Request) -> int:
        return self._sign * request.priority if self.by_priority else 0

    def ordered(self, queue: WaitingQueue, moves: int) -> list[Request]:
        """The waiting requests, first to run first. Each prompt is matched once for a value of `moves`, however many
        turns it waits."""
        waiting = list(queue)
        if moves != self._moves:
            self._moves, self._found = moves, {}
        policy = affordable(self._policy, len(waiting))
        if policy == "fcfs" or len(waiting) <= 1:
            return waiting
        return [waiting[i] for i in order(policy, self._snapshot(policy, waiting), self._rng)]

    def _snapshot(self, policy: str, waiting: list[Request]) -> list[Waiting]:
        """What the policy may look at; the tree is asked only where it does."""
        asked = ((r, (r.tokens[: r.match_cap], r.namespace)) for r in waiting if r not in self._found)
        if policy == "lpm":
            self._found |= {r: (self._tree.match_length(*key), ()) for r, key in asked}
        elif policy == "dfs-weight":
            # All are matched before any path is read: a match may split a node on the path of another.
            nodes = [(r, self._tree.match(*key, touch=False).node) for r, key in asked]
            self._found |= {r: (0, tuple(map(id, path_to(node)))) for r, node in nodes}
        return [Waiting(r.arrival, self.urgency(r), r.max_new, *self._found.get(r, (0, ()))) for r in waiting]
