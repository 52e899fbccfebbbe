# mypy: disable-error-code="no-untyped-call"
"""Copies of pages between a GPU and the host, beside the steps.

Only the gathering of pages and their scattering are on the steps' stream, whose order is theirs; the bytes cross the
bus on a stream of their own. A copy is asynchronous where the caller's buffer is pinned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bough.core.control import CommandResult, CopyPagesIn, CopyPagesOut
from bough.distributed.group import RankGroup
from bough.memory.pools.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class CopyTicket:
    """A copy that is done once the event has happened."""

    event: torch.cuda.Event

    def ready(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> CommandResult:
        self.event.synchronize()
        return CommandResult()


class PageCopies:
    """Owns the stream of the copies."""

    def __init__(self, pool: KVPool, device: torch.device, group: RankGroup) -> None:
        self._pool, self._device, self._group = pool, device, group
        self._stream = torch.cuda.Stream(device)

    @torch.inference_mode()
    def start(self, command: CopyPagesOut | CopyPagesIn) -> CopyTicket:
        pool = self._pool.groups[command.group]
        pages, host = torch.from_numpy(command.pages).to(self._device).long(), torch.from_numpy(command.buffer)
        steps = torch.cuda.current_stream(self._device)
        if isinstance(command, CopyPagesOut):
            content = self._group.all_gather(pool.read_pages(pages))
            self._stream.wait_stream(steps)
            with torch.cuda.stream(self._stream):
                if command.buffer.size:  # the first rank has one
                    host.copy_(content, non_blocking=True)
            content.record_stream(self._stream)
            return CopyTicket(self._stream.record_event())
        with torch.cuda.stream(self._stream):
            content = self._group.own_columns(host).to(self._device, non_blocking=True)
        steps.wait_stream(self._stream)
        pool.write_pages(pages, content)
        content.record_stream(steps)
        return CopyTicket(steps.record_event())
