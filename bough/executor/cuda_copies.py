# mypy: disable-error-code="no-untyped-call"
"""Copies of pages between a GPU and the host, beside the steps.

The bytes cross the bus on a stream of their own, in pieces, so that a long copy takes little of the device's memory.
What is copied in lands in a ring of buffers while earlier steps run, and is scattered to its pages behind them, on a
second stream: of all copies for a step what the first layers read comes first. A step that runs kernel by kernel waits
for each part when a layer reads it; any other waits for the whole. What is copied out `beside` the steps is gathered on
the copies' stream too; later steps wait for other copies out. A copy in is asynchronous, and comes in parts, where the
caller's buffer is pinned. What goes out to a buffer that is not, leaves part by part behind the layers that compute it,
while later ones are at work: to pinned memory, from which a thread puts it into its place.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest

import numpy as np
import torch

from bough.core.control import CommandResult, CopyPagesIn, CopyPagesOut
from bough.core.errors import EngineDeadError
from bough.core.plan import IntArray
from bough.distributed.group import RankGroup
from bough.executor import staging
from bough.kernels.page_copy.triton import copy_pages_
from bough.memory.pools.group_pool import GroupPool, Part
from bough.memory.pools.kv_pool import KVPool

PIECE_BYTES = 64 << 20  # of a copy out
RING, LEAST_RING, RING_BYTES = 16, 4, 16 << 20  # pieces that may have come in before they are scattered
# A part of a copy has this share of a page, but at least so many bytes, because short lines cross the bus slowly.
PARTS, PART_BYTES = 8, 16 << 10


@dataclass(slots=True)
class PageCopy:
    """A copy, and its ticket: it is done once the event has happened. Of a copy in, which alone is timed, the first
    piece crossed the bus between `began` and `ended`; all of it is `pieces` as long: later ones may wait for steps."""

    bring: Callable[[], None]  # queues it, unless it is
    pool: GroupPool
    pages: torch.Tensor
    slots: IntArray
    host: torch.Tensor
    began: torch.cuda.Event
    ended: torch.cuda.Event
    event: torch.cuda.Event
    pieces: float = 0.0
    placed: list[Future[None]] = field(default_factory=list)  # by the thread

    def ready(self) -> bool:
        self.bring()
        return bool(self.event.query()) and all(each.done() for each in self.placed)

    def wait(self) -> CommandResult:
        self.bring()
        self.event.synchronize()
        for each in self.placed:
            each.result()
        return CommandResult(seconds=self.began.elapsed_time(self.ended) / 1e3 * self.pieces if self.pieces else None)


class PageCopies:
    """Owns the streams of the copies and the ring."""

    def __init__(self, pool: KVPool, device: torch.device, group: RankGroup) -> None:
        self._pool, self._device, self._group = pool, device, group
        self._stream, self._landing = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._ring: list[torch.Tensor] = []  # made when pages are copied in for the first time
        self._freed: list[torch.cuda.Event | None] = []  # when each of them may be written again
        self._next = 0
        self._asked: list[PageCopy] = []  # copies in that are not queued yet
        self._due: list[tuple[int, torch.cuda.Event]] = []  # what steps have not waited for, by its first layer
        self._placer, self._hands_out = ThreadPoolExecutor(1, "pages"), False  # whether it has had anything to do
        self._marks: list[tuple[int, torch.cuda.Event]] | None = None  # when the last step began each layer, if it says

    @torch.inference_mode()
    def start(self, command: CopyPagesOut | CopyPagesIn) -> PageCopy:
        # From pinned memory and off the steps' stream: else the host would wait until all steps so far are done.
        numbers = staging.pinned_bytes(8 * len(command.pages)).view(torch.int64).copy_(torch.from_numpy(command.pages))
        with torch.cuda.stream(self._stream):
            pages = numbers.to(self._device, non_blocking=True)
        host, steps = torch.as_tensor(command.buffer), torch.cuda.current_stream(self._device)
        slots = np.arange(len(pages), dtype=np.int32) if command.slots is None else command.slots
        began, ended, event = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        copy = PageCopy(self.bring, self._pool.groups[command.group], pages, slots, host, began, ended, event)
        for stream in (steps, self._landing):
            pages.record_stream(stream)
        if isinstance(command, CopyPagesIn):
            self._asked.append(copy)
        else:
            if self._asked or self._due:  # the pages may be among those
                self.begin_step(by_layer=False)
            on_host = isinstance(command.buffer, np.ndarray)
            staged = on_host and command.slots is None and host.numel() > 0 and not host.is_pinned()
            self._copy_out(copy, command.beside, staged)
        return copy

    def begin_step(self, by_layer: bool) -> None:
        """A step follows which calls `wait_for` at each layer; or something else, which has all pages from the start
        and, being captured maybe, leaves no marks."""
        self._marks = [] if by_layer and self._hands_out else None
        self.bring()
        if not by_layer:
            self.wait_for()

    def wait_for(self, layer: int = sys.maxsize) -> None:
        """What is put on the steps' stream next may read what this layer, and those before it, keep of pages."""
        self.bring()
        while self._due and self._due[0][0] <= layer:
            torch.cuda.current_stream(self._device).wait_event(self._due.pop(0)[1])
        if self._marks is not None and layer < sys.maxsize:
            self._marks.append((layer, torch.cuda.current_stream(self._device).record_event()))

    def bring(self) -> None:
        """Queues the copies in that were asked for. Comes before the step that reads them."""
        if self._asked:
            asked, self._asked = self._asked, []
            self._landing.wait_stream(torch.cuda.current_stream(self._device))  # the pages may be in use until then
            parts = list[tuple[Part, PageCopy]]()
            for copy in asked:
                whole = copy.pool.page_bytes
                least = max(whole // PARTS, PART_BYTES) if copy.host.is_pinned() else whole
                parts += [(part, copy) for part in copy.pool.parts(least)]
            for part, copy in sorted(parts, key=lambda each: each[0].layer):
                self._bring(part, copy)
                copy.event = self._landing.record_event()
                self._due.append((part.layer, copy.event))
            self._due.sort(key=lambda each: each[0])

    @torch.inference_mode()
    def _bring(self, part: Part, copy: PageCopy) -> None:
        width = part.columns.stop - part.columns.start
        host = self._group.own_columns(copy.host, copy.pool.page_bytes)[:, part.columns]
        if not self._ring:
            nbytes = max(RING_BYTES, *(each.page_bytes for each in self._pool.groups))
            count = max(LEAST_RING, RING * RING_BYTES // nbytes)  # a recurrent state may be larger than a piece
            self._ring = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(count)]
            self._freed = [None] * count
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # whatever had this memory before
        size = max(1, RING_BYTES // width)
        for begin in range(0, len(copy.pages), size):
            slots, freed = copy.slots[begin : begin + size], self._freed[self._next]
            content = self._ring[self._next][: len(slots) * width].view(len(slots), width)
            with torch.cuda.stream(self._stream):
                if freed is not None:
                    self._stream.wait_event(freed)
                if not copy.pieces:
                    copy.began.record()
                for start, end, slot in _runs(slots):
                    copy_lines(content[start:end], host[slot : slot + end - start])
                if not copy.pieces:
                    copy.ended.record()
                    copy.pieces = len(copy.pages) / len(slots) * copy.pool.page_bytes / width
            self._landing.wait_stream(self._stream)
            with torch.cuda.stream(self._landing):
                _copy_pages(copy.pool, part, copy.pages[begin : begin + size], content, into_pages=True)
            self._freed[self._next] = self._landing.record_event()
            self._next = (self._next + 1) % len(self._ring)

    def _copy_out(self, copy: PageCopy, beside: bool, staged: bool) -> None:
        steps, pool, whole = torch.cuda.current_stream(self._device), copy.pool, copy.pool.page_bytes
        alone = self._group.topology.tp_size == 1 or copy.host.shape[1] == whole
        # Ranks meet on the stream of the steps alone: an exchange beside one of a step could meet another's.
        gathering = self._stream if alone else steps
        gathering.wait_stream(self._stream)  # for the numbers of the pages
        self._hands_out |= staged
        parts = pool.parts(max(whole // PARTS, PART_BYTES) if staged and alone else whole)
        for part, following in zip_longest(parts, parts[1:]):
            behind = (event for layer, event in self._marks or () if following and layer >= following.layer)
            self._stream.wait_event(next(behind, None) or steps.record_event())
            width = part.columns.stop - part.columns.start
            size = max(1, PIECE_BYTES // max(1, width))
            for begin in range(0, len(copy.pages), size):
                piece, slots = copy.pages[begin : begin + size], copy.slots[begin : begin + size]
                with torch.cuda.stream(gathering):
                    own = torch.empty(len(piece), width, dtype=torch.uint8, device=self._device)
                    _copy_pages(pool, part, piece, own, into_pages=False)
                    content = own if alone else self._group.all_gather(own)
                self._stream.wait_stream(gathering)
                with torch.cuda.stream(self._stream):
                    if staged:
                        held = staging.pinned_bytes(content.numel()).view(content.shape)
                        held.copy_(content, non_blocking=True)
                        to = copy.host[begin : begin + size, part.columns.start :][:, : content.shape[1]]
                        copy.placed.append(self._placer.submit(_place, held, to, self._stream.record_event()))
                    for start, end, slot in _runs(slots) if copy.host.numel() and not staged else ():
                        copy.host[slot : slot + end - start].copy_(content[start:end], non_blocking=True)
                if not (alone and beside):
                    steps.wait_stream(self._stream)
        copy.event = self._stream.record_event()


def _copy_pages(pool: GroupPool, part: Part, pages: torch.Tensor, lines: torch.Tensor, *, into_pages: bool) -> None:
    copy_pages_(pool.table[part.tensors], pool.sizes[part.tensors], pages, lines, into_pages)


@torch.inference_mode()
def _place(content: torch.Tensor, to: torch.Tensor, behind: torch.cuda.Event) -> None:
    behind.synchronize()
    to.copy_(content)


def copy_lines(to: torch.Tensor, origin: torch.Tensor) -> None:
    """Copies lines of the host's memory to the device, on the current stream. torch would first put lines that do not
    stand side by side into other memory of the host, and have the caller wait for that."""
    if origin.is_contiguous() or not origin.is_pinned():
        to.copy_(origin, non_blocking=True)
        return
    lines = to.data_ptr(), to.stride(0), origin.data_ptr(), origin.stride(0), origin.shape[1], len(origin)
    to_device, stream = 1, ctypes.c_void_p(torch.cuda.current_stream(to.device).cuda_stream)
    if code := _cudart().cudaMemcpy2DAsync(*map(ctypes.c_size_t, lines), to_device, stream):
        raise EngineDeadError(f"Pages cannot be copied to the GPU (CUDA error {code}).")


_cudart = cache(lambda: ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).split('.')[0]}"))  # which torch has loaded


def _runs(slots: IntArray) -> Iterator[tuple[int, int, int]]:
    """Runs of consecutive slots: where each begins and ends in the list, and its first slot."""
    cuts = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    for first, last in zip([0, *cuts], [*cuts, len(slots)], strict=True):
        yield first, last, int(slots[first])
