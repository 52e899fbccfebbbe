"""A prefill engine as its scheduler sees it: requests end with their first token, and their pages go out by chunks.

A request runs once a decode engine has claimed its room. Pages are copied out in plan order, right behind the step that
computes them, so they need not be held: whoever gets them next writes later. Answers pass through here on their way to
the detokenizer. Those of requests that decode engines have brought go no further.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bough.constrained.interface import Ticket as GrammarTicket
from bough.core.control import CopyPagesOut, Ticket
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort
from bough.core.plan import Executor, IntArray
from bough.disaggregation.desks import FOREIGN, Claimed, Expect, Forget, Left, Say
from bough.disaggregation.link import Link
from bough.disaggregation.wire import Buffer, Claim, Done, Failed, Pages, Part, SharedMemory, digest_of
from bough.messages.channels import client_of
from bough.messages.outputs import WEIGHT_VERSION, Ended, Open, Reply, StepOutput
from bough.messages.requests import Generate, Ping, ProcessCommand
from bough.scheduler.assembly import Chunk, PlannedStep
from bough.scheduler.handover import Handover
from bough.scheduler.ports import Outbox
from bough.scheduler.request import Request
from bough.scheduler.running_batch import RunningBatch


@dataclass(slots=True)
class Sending:
    """A claimed room whose request runs or waits for a row."""

    room: int
    request: Request
    shared: bool
    next_page: int  # the first that has not been sent


@dataclass(frozen=True, slots=True)
class Parcel:
    """Goes out when its copies are done, in order."""

    tickets: tuple[Ticket, ...]
    say: Say


class PrefillSide(Handover):
    """Stands between the scheduler and its outbox as well."""

    def __init__(self, executor: Executor, outbox: Outbox, link: Link) -> None:
        super().__init__()
        self._executor, self._outbox, self._link = executor, outbox, link
        self._limits = executor.limits()
        self._unclaimed: dict[int, Request] = {}  # by room
        self._claims: dict[int, Claimed] = {}  # by room: their requests are on the way
        self._sending: dict[int, Sending] = {}  # by handle
        self._parcels: deque[Parcel] = deque()
        self._passing: list[tuple[Request, GrammarTicket | None, FinishAbort | None]] = []
        self.counts = {"transfers": 0, "transferred_bytes": 0, "failed_transfers": 0}

    def attach(self, batch: RunningBatch, facts: Mapping[str, str], drop: Callable[[Request], None]) -> None:
        self._batch, self._facts = batch, facts

    @property
    def busy(self) -> bool:  # type: ignore[override]
        return bool(self._parcels)

    # -- requests ------------------------------------------------------------------------------------------------------

    def check(self, message: Generate) -> None:
        if message.bootstrap is not None and message.bootstrap.room is None:
            raise RequestError("bootstrap_room is missing: it names the request for both engines.", field="bootstrap_room")

    def enter(self, request: Request, message: Generate, ticket: GrammarTicket | None) -> bool:
        if message.bootstrap is None or message.bootstrap.room is None:
            return False
        room = message.bootstrap.room
        self._hear()
        request.end_after_one()
        claimed = self._claims.pop(room, None)
        if claimed is not None and self._begin(request, claimed):
            return False
        self._waiting[request] = ticket
        if claimed is None:
            self._unclaimed[room] = request
            self._link.order(Expect(room))
        return True

    def leave(self, request: Request) -> None:
        super().leave(request)
        for room in [room for room, waiting in self._unclaimed.items() if waiting is request]:
            del self._unclaimed[room]
            self._link.order(Forget(room))

    def passed(self) -> list[tuple[Request, GrammarTicket | None, FinishAbort | None]]:
        self._hear()
        while self._parcels and all(ticket.ready() for ticket in self._parcels[0].tickets):
            parcel = self._parcels.popleft()
            for ticket in parcel.tickets:
                ticket.wait()
            self._link.order(parcel.say)
        passing, self._passing = self._passing, []
        return passing

    def close(self) -> None:
        self._link.close()

    def _hear(self) -> None:
        for news in self._link.take_news():
            if isinstance(news, Claimed):
                request = self._unclaimed.pop(news.claim.room, None)
                if request is None:
                    self._claims[news.claim.room] = news
                elif self._begin(request, news):
                    self._passing.append((request, self._waiting.pop(request), None))
            elif isinstance(news, Left):
                self._let_go(news)

    def _begin(self, request: Request, claimed: Claimed) -> bool:
        """False: it ends, because it is not what the decode engine has."""
        claim: Claim = claimed.claim
        if claim.digest != digest_of(request.tokens, request.namespace):
            reason = "The two engines have got different prompts for one bootstrap_room."
            self._link.order(Say(Failed(claim.room, reason, 400, "BadRequestError")))
            self._passing.append((request, None, FinishAbort(reason, field="bootstrap_room")))
            return False
        first = claim.have // self._limits.page_size
        self._sending[request.handle] = Sending(claim.room, request, claimed.shared, first)
        return True

    def _let_go(self, left: Left) -> None:
        self._claims.pop(left.room, None)
        request = self._unclaimed.pop(left.room, None)
        if request is None:
            request = next((each.request for each in self._sending.values() if each.room == left.room), None)
        else:
            self.counts["failed_transfers"] += 1
        if request is not None:
            self._passing.append((request, None, FinishAbort(left.reason, 504, "AbortError")))

    # -- pages ---------------------------------------------------------------------------------------------------------

    def launched(self, step: PlannedStep) -> None:
        if not self._sending:
            return
        for chunk in step.chunks:
            sending = self._sending.get(chunk.request.handle)
            if sending is not None:
                self._send_chunk(sending, chunk)

    def _send_chunk(self, sending: Sending, chunk: Chunk) -> None:
        """Whole pages. What a window or a state holds behind the whole prompt goes with its last chunk."""
        table, row, end = self._batch.table, chunk.request.row, chunk.first + chunk.count
        first, whole = sending.next_page, end // self._limits.page_size
        found: list[tuple[Part, IntArray]] = []
        if whole > first:
            found.append((Part(0, first, whole - first), table.pages[row, first:whole].copy()))
            sending.next_page = whole
        for index, group in enumerate(self._batch.cache.groups if chunk.final else ()):
            if group.is_state:
                begin, stop, count = 0, 1, whole - 1
            else:
                needed = int(group.first_needed(np.array([end], dtype=np.int32))[0])
                begin, stop = max(needed, int(table.group_first[index][row])), whole
                count = begin
            pages = table.group_pages[index][row, begin:stop].copy()
            if len(pages):
                found.append((Part(index + 1, count, len(pages)), pages))
        if found:
            self._pack(sending, found)

    def _pack(self, sending: Sending, found: Sequence[tuple[Part, IntArray]]) -> None:
        size = sum(part.count * self._limits.copied_bytes(part.group) for part, _ in found)
        memory = SharedMemory(size) if sending.shared else None
        buffer: Buffer = np.empty(size, dtype=np.uint8) if memory is None else memory.array
        tickets, at = [], 0
        for part, pages in found:
            width = self._limits.copied_bytes(part.group)
            view = buffer[at : at + part.count * width].reshape(part.count, width)
            tickets.append(self._executor.control(CopyPagesOut(pages, view, part.group)))
            at += view.size
        parts, version = [part for part, _ in found], self._facts.get("weight_version", WEIGHT_VERSION)
        where = () if memory is None else (os.getpid(), memory.fd, size)
        say = Say(Pages(sending.room, parts, version, *where), buffer if memory is None else memory)
        self._parcels.append(Parcel(tuple(tickets), say))
        self.counts["transferred_bytes"] += size

    # -- answers -------------------------------------------------------------------------------------------------------

    def tokens(self, message: Open | StepOutput | Ping | ProcessCommand) -> None:
        if isinstance(message, Open) and client_of(message.handle) == FOREIGN:
            return
        if isinstance(message, StepOutput):
            self._hear()
            for end in message.ended:
                self._hand_over(end, message)
        self._outbox.tokens(message)  # what it says of requests without an `Open` finds nobody

    def reply(self, message: Reply) -> None:
        self._outbox.reply(message)

    def _hand_over(self, end: Ended, step: StepOutput) -> None:
        room = self._room_of(end.handle)
        if room is None:
            return
        last: Done | Failed
        if isinstance(end.reason, FinishAbort):
            reason = end.reason
            last = Failed(room, reason.message, reason.status_code, reason.err_type)
            self.counts["failed_transfers"] += 1
        else:
            started = next((each for each in step.started if each.handle == end.handle), None)
            last = Done(room, _tokens_of(end.handle, step), started, step.logprobs.get(end.handle))
            self.counts["transfers"] += 1
        self._parcels.append(Parcel((), Say(last)))

    def _room_of(self, handle: int) -> int | None:
        """Of a request that ends; one that was refused has not begun to send."""
        sending = self._sending.pop(handle, None)
        if sending is not None:
            return sending.room
        room = next((room for room, claimed in self._claims.items() if claimed.handle == handle), None)
        if room is not None:
            del self._claims[room]
        return room


def _tokens_of(handle: int, step: StepOutput) -> bytes:
    handles = np.frombuffer(step.handles, dtype=np.int64)
    ends = np.frombuffer(step.counts, dtype=np.int32).cumsum() if step.counts else np.arange(1, len(handles) + 1)
    place = np.flatnonzero(handles == handle)
    if not len(place):
        return b""
    first = 0 if place[0] == 0 else int(ends[place[0] - 1])
    return np.frombuffer(step.tokens, dtype=np.int32)[first : int(ends[place[0]])].tobytes()
