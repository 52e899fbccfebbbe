"""Ranks as threads of one process: they meet at a barrier, and add up in the order of ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from bough.core.errors import RankLostError
from bough.distributed.group import RankGroup
from bough.distributed.topology import Topology

T = TypeVar("T")
PATIENCE_S = 60.0


class MeetingPlace:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadGroup(RankGroup):
    def __init__(self, place: MeetingPlace, rank: int) -> None:
        self.topology = Topology(rank, place.barrier.parties)
        self._place = place

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._meet(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._meet(x), dim=1)

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        return self._meet(x)[0]

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(torch.stack(self._meet(torch.tensor(values))).amin(0).tolist())

    def _meet(self, x: torch.Tensor) -> list[torch.Tensor]:
        place = self._place
        place.brought[self.topology.tp_rank] = x.clone()
        try:
            place.barrier.wait(PATIENCE_S)
            found = [part.clone() for part in place.brought]
            place.barrier.wait(PATIENCE_S)  # nobody brings the next before all have taken this
        except threading.BrokenBarrierError:
            raise RankLostError(f"nobody came in {self.doing}") from None
        return found


def thread_groups(size: int) -> list[ThreadGroup]:
    place = MeetingPlace(size)
    return [ThreadGroup(place, rank) for rank in range(size)]


def on_ranks(size: int, work: Callable[[ThreadGroup], T]) -> list[T]:
    """What each rank's work returns; where one fails, the others do not wait for it."""

    def run(group: ThreadGroup) -> T:
        try:
            return work(group)
        except BaseException:
            group._place.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, thread_groups(size)))
