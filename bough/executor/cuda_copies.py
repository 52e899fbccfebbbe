# mypy: disable-error-code="no-untyped-call"
"""Copies of pages between a GPU and the host, beside the steps.

The bytes cross the bus on a stream of their own, in pieces, so that a long copy takes little of the device's memory.
What is copied in lands in a ring of buffers while earlier steps run, and is scattered to its pages behind them, on a
second stream: of all copies for a step what the first layers read comes first. A step that runs kernel by kernel waits
for each part when a layer reads it; any other waits for the whole. What is copied out `beside` the steps is gathered on
the copies' stream too; later steps wait for other copies out. A copy is asynchronous, and comes in parts, where the
caller's buffer is pinned.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from bough.core.control import CommandResult, CopyPagesIn, CopyPagesOut
from bough.core.errors import EngineDeadError
from bough.core.plan import IntArray
from bough.distributed.group import RankGroup
from bough.memory.pools.group_pool import Part, runs
from bough.memory.pools.kv_pool import KVPool

PIECE_BYTES = 64 << 20  # of a copy out
RING, RING_BYTES = 16, 16 << 20  # pieces that may have come in before they are scattered
# Of a copy in: a part has this share of a page, but at least so many bytes, because short lines cross the bus slowly.
PARTS, PART_BYTES = 8, 16 << 10
EVERY_LAYER = sys.maxsize


@dataclass(slots=True)
class CopyTicket:
    """A copy that is done once the event has happened. Its first piece crossed the bus between `began` and `ended`, and
    all of it is `pieces` as long: later ones may have waited for steps."""

    bring: Callable[[], None]  # queues copies in that were asked for
    began: torch.cuda.Event
    ended: torch.cuda.Event
    event: torch.cuda.Event | None = None  # None: it is not queued yet
    pieces: float = 0.0

    def ready(self) -> bool:
        return bool(self._queued().query())

    def wait(self) -> CommandResult:
        self._queued().synchronize()
        return CommandResult(seconds=self.began.elapsed_time(self.ended) / 1e3 * self.pieces)

    def _queued(self) -> torch.cuda.Event:
        self.bring()
        assert self.event is not None
        return self.event


class PageCopies:
    """Owns the streams of the copies and the ring."""

    def __init__(self, pool: KVPool, device: torch.device, group: RankGroup) -> None:
        self._pool, self._device, self._group = pool, device, group
        self._stream, self._landing = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._ring: list[torch.Tensor] = []  # made when pages are copied in for the first time
        self._freed: list[torch.cuda.Event | None] = [None] * RING  # when each of them may be written again
        self._next = 0
        self._asked: list[tuple[CopyPagesIn, CopyTicket]] = []  # since copies in were last queued
        self._due: list[tuple[int, torch.cuda.Event]] = []  # what steps have not waited for, by the first layer to read

    @torch.inference_mode()
    def start(self, command: CopyPagesOut | CopyPagesIn) -> CopyTicket:
        ticket = CopyTicket(self.bring, *(torch.cuda.Event(enable_timing=True) for _ in range(2)))
        if isinstance(command, CopyPagesIn):
            self._asked.append((command, ticket))
        else:
            self.settle()
            self._copy_out(command, ticket)
        return ticket

    def settle(self) -> None:
        """What is put on the steps' stream next may read all pages."""
        self.bring()
        self.wait_for(EVERY_LAYER)

    def wait_for(self, layer: int) -> None:
        """It may read what this layer, and those before it, keep of pages that are on their way."""
        while self._due and self._due[0][0] <= layer:
            torch.cuda.current_stream(self._device).wait_event(self._due.pop(0)[1])

    @torch.inference_mode()
    def bring(self) -> None:
        """Queues the copies in that were asked for. Comes before the step that reads them."""
        asked, self._asked = self._asked, []
        if not asked:
            return
        steps = torch.cuda.current_stream(self._device)
        work: list[tuple[int, CopyTicket, Callable[[], None]]] = []
        for command, ticket in asked:
            pool = self._pool.groups[command.group]
            host = self._group.own_columns(torch.from_numpy(command.buffer), pool.page_bytes)
            pages = torch.from_numpy(command.pages).to(self._device).long()
            pages.record_stream(self._landing)
            slots = np.arange(len(pages), dtype=np.int32) if command.slots is None else command.slots
            share = pool.page_bytes // PARTS if host.is_pinned() else pool.page_bytes
            for part in pool.parts(max(share, PART_BYTES)):
                work.append((part.first, ticket, partial(self._bring, command.group, part, pages, slots, host, ticket)))
        self._landing.wait_stream(steps)  # the pages may be in use until then
        for first, ticket, bring in sorted(work, key=lambda each: each[0]):
            bring()
            ticket.event = self._landing.record_event()
            self._due.append((first, ticket.event))
        self._due.sort(key=lambda each: each[0])

    def _bring(
        self, group: int, part: Part, pages: torch.Tensor, slots: IntArray, host: torch.Tensor, ticket: CopyTicket
    ) -> None:
        if not self._ring:
            nbytes = max(RING_BYTES, *(each.page_bytes for each in self._pool.groups))
            self._ring = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(RING)]
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # whatever had this memory before
        size = max(1, RING_BYTES // part.nbytes)
        for begin in range(0, len(pages), size):
            places, freed = slots[begin : begin + size], self._freed[self._next]
            content = self._ring[self._next][: len(places) * part.nbytes].view(len(places), part.nbytes)
            with torch.cuda.stream(self._stream):
                if freed is not None:
                    self._stream.wait_event(freed)
                if not ticket.pieces:
                    ticket.began.record()
                for first, last, slot in runs(places):
                    at = 0
                    for column in part.columns:
                        width = column.stop - column.start
                        copy_lines(content[first:last, at : at + width], host[slot : slot + last - first, column])
                        at += width
                if not ticket.pieces:
                    ticket.ended.record()
                    ticket.pieces = len(pages) * host.shape[1] / content.nbytes
            self._landing.wait_stream(self._stream)
            with torch.cuda.stream(self._landing):
                self._pool.groups[group].write_pages(pages[begin : begin + size], content, part)
            self._freed[self._next] = self._landing.record_event()
            self._next = (self._next + 1) % RING

    def _copy_out(self, command: CopyPagesOut, ticket: CopyTicket) -> None:
        pool, steps = self._pool.groups[command.group], torch.cuda.current_stream(self._device)
        alone = self._group.topology.tp_size == 1 or command.buffer.shape[1] == pool.page_bytes
        pages, host = torch.from_numpy(command.pages).to(self._device).long(), torch.from_numpy(command.buffer)
        slots = np.arange(len(pages), dtype=np.int32) if command.slots is None else command.slots
        size = max(1, PIECE_BYTES // max(1, pool.page_bytes))
        self._stream.wait_stream(steps)
        for begin in range(0, len(pages), size):
            piece, places = pages[begin : begin + size], slots[begin : begin + size]
            # Ranks meet on the stream of the steps alone: an exchange beside one of a step could meet another's.
            with torch.cuda.stream(self._stream if alone else steps):
                content = pool.read_pages(piece) if alone else self._group.all_gather(pool.read_pages(piece))
            if not alone:
                self._stream.wait_stream(steps)
            with torch.cuda.stream(self._stream):
                if not begin:
                    ticket.began.record()
                for first, last, slot in runs(places) if command.buffer.size else ():  # the first rank has a buffer
                    host[slot : slot + last - first].copy_(content[first:last], non_blocking=True)
                if not begin:
                    ticket.ended.record()
            if not (alone and command.beside):
                steps.wait_stream(self._stream)
        pages.record_stream(self._stream)
        ticket.event, ticket.pieces = self._stream.record_event(), len(pages) / min(size, len(pages))


def copy_lines(to: torch.Tensor, origin: torch.Tensor) -> None:
    """Copies lines of the host's memory to the device, on the current stream. torch would first put lines that do not
    stand side by side into other memory of the host, and have the caller wait for that."""
    if origin.is_contiguous() or not origin.is_pinned():
        to.copy_(origin, non_blocking=True)
        return
    lines = to.data_ptr(), to.stride(0), origin.data_ptr(), origin.stride(0), origin.shape[1], len(origin)
    if code := _memcpy_2d()(*lines, 1, torch.cuda.current_stream(to.device).cuda_stream):
        raise EngineDeadError(f"Pages cannot be copied to the GPU (CUDA error {code}).")


@cache
def _memcpy_2d() -> Any:
    """torch has loaded the library already."""
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    function = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}").cudaMemcpy2DAsync
    function.argtypes = pointer, size, pointer, size, size, size, ctypes.c_int, pointer
    return function
