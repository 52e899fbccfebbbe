# mypy: disable-error-code="no-untyped-call"
"""Copies of pages between a GPU and the host, beside the steps.

The bytes cross the bus on a stream of their own, in pieces, so that a long copy takes little of the device's memory.
What is copied in lands in a ring of buffers while earlier steps run, and is scattered to its pages on the steps'
stream, whose order is that of plans. What is copied out `beside` the steps is gathered on the copies' stream too; later
steps wait for other copies out. A copy is asynchronous where the caller's buffer is pinned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bough.core.control import CommandResult, CopyPagesIn, CopyPagesOut
from bough.core.plan import IntArray
from bough.distributed.group import RankGroup
from bough.memory.pools.kv_pool import KVPool

PIECE_BYTES = 64 << 20
RING = 4  # pieces that may have come in before they are scattered


@dataclass(frozen=True, slots=True)
class CopyTicket:
    """A copy that is done once the event has happened. Its first piece crossed the bus between `began` and `ended`, and
    all of it is `pieces` as long: later ones may have waited for steps."""

    event: torch.cuda.Event
    began: torch.cuda.Event
    ended: torch.cuda.Event
    pieces: float

    def ready(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> CommandResult:
        self.event.synchronize()
        return CommandResult(seconds=self.began.elapsed_time(self.ended) / 1e3 * self.pieces)


class PageCopies:
    """Owns the stream of the copies and the ring."""

    def __init__(self, pool: KVPool, device: torch.device, group: RankGroup) -> None:
        self._pool, self._device, self._group = pool, device, group
        self._stream = torch.cuda.Stream(device)
        self._ring: list[torch.Tensor] = []  # made when pages are copied in for the first time
        self._freed: list[torch.cuda.Event | None] = [None] * RING  # when each of them may be written again
        self._next = 0

    @torch.inference_mode()
    def start(self, command: CopyPagesOut | CopyPagesIn) -> CopyTicket:
        pool, steps = self._pool.groups[command.group], torch.cuda.current_stream(self._device)
        alone = self._group.topology.tp_size == 1
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        pages, host = torch.from_numpy(command.pages).to(self._device).long(), torch.from_numpy(command.buffer)
        slots = np.arange(len(pages), dtype=np.int32) if command.slots is None else command.slots
        size = max(1, PIECE_BYTES // max(1, pool.page_bytes))
        if isinstance(command, CopyPagesOut):
            self._stream.wait_stream(steps)
        for begin in range(0, len(pages), size):
            piece, places = pages[begin : begin + size], slots[begin : begin + size]
            times = (began, ended) if not begin else ()
            if isinstance(command, CopyPagesIn):
                pool.write_pages(piece, self._bring(host, places, pool.page_bytes, steps, times))
                self._freed[self._next] = steps.record_event()
                self._next = (self._next + 1) % RING
                continue
            # Ranks meet on the stream of the steps alone: an exchange beside one of a step could meet another's.
            with torch.cuda.stream(self._stream if alone else steps):
                content = self._group.all_gather(pool.read_pages(piece))
            if not alone:
                self._stream.wait_stream(steps)
            with torch.cuda.stream(self._stream):
                for event in times[:1]:
                    event.record()
                for first, last, slot in _runs(places) if command.buffer.size else ():  # the first rank has a buffer
                    host[slot : slot + last - first].copy_(content[first:last], non_blocking=True)
                for event in times[1:]:
                    event.record()
            if not (alone and command.beside):
                steps.wait_stream(self._stream)
        pages.record_stream(self._stream)
        done = steps if isinstance(command, CopyPagesIn) else self._stream
        return CopyTicket(done.record_event(), began, ended, len(pages) / min(size, len(pages)))

    def _bring(
        self,
        host: torch.Tensor,
        slots: IntArray,
        page_bytes: int,
        steps: torch.cuda.Stream,
        times: tuple[torch.cuda.Event, ...],
    ) -> torch.Tensor:
        """These rows of the host's memory in a buffer of the ring, there for what is put on the steps' stream next."""
        if not self._ring:
            nbytes = max(PIECE_BYTES, *(group.page_bytes for group in self._pool.groups))
            self._ring = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(RING)]
            self._stream.wait_stream(steps)  # whatever had this memory before
        content = self._ring[self._next][: len(slots) * page_bytes].view(len(slots), page_bytes)
        freed = self._freed[self._next]
        with torch.cuda.stream(self._stream):
            if freed is not None:
                self._stream.wait_event(freed)
            for event in times[:1]:
                event.record()
            for first, last, slot in _runs(slots):
                own = self._group.own_columns(host[slot : slot + last - first])
                content[first:last].copy_(own, non_blocking=True)
            for event in times[1:]:
                event.record()
        steps.wait_stream(self._stream)
        return content


def _runs(slots: IntArray) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive slots: where each begins and ends in the list, and its first slot."""
    cuts = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    for first, last in zip([0, *cuts], [*cuts, len(slots)], strict=True):
        yield first, last, int(slots[first])
