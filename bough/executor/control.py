"""What commands do to a model in memory: its weights, its pages and the profiler. All executors share it.

What an executor has made for certain addresses (captured graphs, tapes) is its own: it is told when to drop that, and
when all memory is there again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import torch

from bough.core.control import (
    MEMORY_TAGS,
    Command,
    CommandResult,
    CopyPagesIn,
    CopyPagesOut,
    MemoryTag,
    ProfileStart,
    ProfileStop,
    Sleep,
    SwapWeights,
    Wake,
)
from bough.core.errors import RequestError
from bough.executor.profiler import TorchProfiler
from bough.executor.weights import WeightStore
from bough.memory.pools.kv_pool import KVPool


def nothing() -> None:
    """For executors that keep no addresses."""


class ModelControl:
    """Does commands on the calling thread. `drop` is called before addresses change, `rebuild` when they hold again."""

    def __init__(
        self,
        weights: WeightStore | None,
        pool: KVPool,
        *,
        drop: Callable[[], None] = nothing,
        rebuild: Callable[[], None] = nothing,
    ) -> None:
        """Without `weights`, as in a rehearsal, they can be neither swapped nor released."""
        self._weights, self._pool, self._drop, self._rebuild = weights, pool, drop, rebuild
        self._profiler = TorchProfiler()
        self._asleep: set[MemoryTag] = set()

    @property
    def asleep(self) -> bool:
        return bool(self._asleep)

    def run(self, command: Command) -> CommandResult:
        message = ""
        match command:
            case SwapWeights():
                message = self._swap(command)
            case Sleep():
                message = self._sleep([tag for tag in command.tags if tag not in self._asleep])
            case Wake():
                message = self._wake([tag for tag in command.tags if tag in self._asleep])
            case CopyPagesOut():
                content = self._pool.groups[command.group].read_pages(torch.from_numpy(command.pages))
                torch.from_numpy(command.buffer).copy_(content)
            case CopyPagesIn():
                pages, content = torch.from_numpy(command.pages).long(), torch.from_numpy(command.buffer)
                self._pool.groups[command.group].write_pages(pages, content)
            case ProfileStart():
                self._profiler.start(command)
            case ProfileStop():
                message = self._profiler.stop()
            case _:
                assert_never(command)
        return CommandResult(message, self._obstacle())

    def _swap(self, command: SwapWeights) -> str:
        if "weights" in self._asleep:
            raise RequestError("The weights are released; resume them first (/resume_memory_occupation).")
        assert self._weights is not None
        checkpoint = self._weights.find(command.model_path, command.load_format)
        if not self._weights.in_place:
            self._drop()
        self._weights.fill(checkpoint)
        if not self._weights.in_place and not self._asleep:
            self._rebuild()
        return f"The weights are those of {command.model_path}."

    def _sleep(self, tags: list[MemoryTag]) -> str:
        if tags:
            self._drop()
        for tag in tags:
            self._owner_of(tag).release()
            self._asleep.add(tag)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return f"Released: {', '.join(tags) or 'nothing, it was before'}."

    def _wake(self, tags: list[MemoryTag]) -> str:
        for tag in tags:
            self._owner_of(tag).restore()
            self._asleep.discard(tag)
        if tags and not self._asleep:
            self._rebuild()
        return f"Resumed: {', '.join(tags) or 'nothing, it was not released'}."

    def _owner_of(self, tag: MemoryTag) -> WeightStore | KVPool:
        if tag == "kv_cache":
            return self._pool
        assert self._weights is not None
        return self._weights

    def _obstacle(self) -> str:
        if not self._asleep:
            return ""
        tags = " and ".join(tag for tag in MEMORY_TAGS if tag in self._asleep)
        return f"The engine's memory ({tags}) is released; resume it first (/resume_memory_occupation)."
