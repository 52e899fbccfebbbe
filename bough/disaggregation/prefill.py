"""A prefill engine: requests end with their first token, and their pages go out chunk by chunk.

A request runs once a decode engine has claimed its room. Pages are copied out in plan order, right behind the step that
computes them, so they need not be held: their next owner writes later. Answers pass through here on their way to
the detokenizer, which does not hear of requests that decode engines have brought.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from bough.constrained.interface import Ticket as GrammarTicket
from bough.core.control import CopyPagesOut, Ticket
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort, FinishLength
from bough.core.plan import IntArray
from bough.disaggregation import wire
from bough.disaggregation.link import TICK_S, Side
from bough.disaggregation.transports import LIBRARIES
from bough.disaggregation.wire import Buffer, Claim, Done, Failed, Pages, Part
from bough.messages.channels import client_of, first_handle
from bough.messages.outputs import Ended, Open, StepOutput
from bough.messages.requests import Bootstrap, Generate, Ping, ProcessCommand
from bough.scheduler.assembly import Chunk, PlannedStep
from bough.scheduler.handover import Passing
from bough.scheduler.request import Request

PIECE_BYTES = 16 << 20
FOREIGN = 1 << 14  # the client number of requests that decode engines bring
OTHER_PROMPT = "The two engines have got different prompts, or adapters, for one bootstrap_room."


@dataclass(slots=True, eq=False)
class Room:
    number: int
    until_s: float  # when claim and request must have met
    claim: Claim | None = None
    peer: Any = None
    gpus: tuple[str, ...] | None = None  # whose memory the decode engine can read; None: not even the host's
    request: Request | None = None
    next_page: int = 0  # the first that has not been sent
    tokens: int = 0  # that the decode engine knows of; forced ones behind them may be computed here too


@dataclass(frozen=True, slots=True)
class Parcel:
    """Goes out when its copies are done, in order."""

    room: Room
    message: Pages | Done | Failed
    tickets: tuple[Ticket, ...] = ()
    content: Buffer | None = None


class PrefillSide(Side):
    """Stands between the scheduler and its outbox as well."""

    def __init__(self, *parts: Any, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(*parts)
        self._clock, self.reply = clock, self._outbox.reply
        self._rooms: dict[int, Room] = {}
        self._of: dict[int, Room] = {}  # by handle
        self._handle, self._ticked_s = first_handle(FOREIGN), 0.0
        self._parcels: deque[Parcel] = deque()
        self._lent: dict[bytes, tuple[float, Room, Buffer]] = {}  # by its stamp; until when decode engines may read it

    @property
    def busy(self) -> bool:
        return bool(self._parcels)

    def waits(self) -> bool:
        return bool(self._rooms or self._lent)

    # -- requests ------------------------------------------------------------------------------------------------------

    def check(self, message: Generate) -> None:
        if message.bootstrap is None:
            return
        room = self._rooms.get(-1 if message.bootstrap.room is None else message.bootstrap.room)
        left = room is None and client_of(message.handle) == FOREIGN  # who has brought it does not wait any more
        if message.bootstrap.room is None or left or (room is not None and room.request is not None):
            raise RequestError("bootstrap_room must name one request, for both engines.", field="bootstrap_room")

    def enter(self, request: Request, message: Generate, ticket: GrammarTicket | None) -> bool:
        if message.bootstrap is None or message.bootstrap.room is None or self.stays(message):
            return False
        if ticket is None:
            request.end_after_one()  # else what its grammar forces around that token belongs to it
        room = self._of[request.handle] = self._room(message.bootstrap.room)
        room.request, self[request] = request, ticket
        self._begin(room)
        return True

    def passed(self) -> list[Passing]:
        while self._parcels and all(ticket.ready() for ticket in self._parcels[0].tickets):
            self._deliver()
        return super().passed()

    def _room(self, number: int) -> Room:
        until_s = self._clock() + self._settings.disaggregation_claim_timeout_s
        return self._rooms.setdefault(number, Room(number, until_s))

    def _begin(self, room: Room) -> None:
        """Once both are there, claim and request."""
        request, claim = room.request, room.claim
        if request is None or claim is None:
            return
        if claim.digest != wire.digest_of(request):
            self._passing.append((request, FinishAbort(OTHER_PROMPT, field="bootstrap_room")))
            return
        room.next_page, room.tokens = claim.have // self._limits.page_size, len(request.tokens)
        self._passing.append((request, None))

    # -- decode engines ------------------------------------------------------------------------------------------------

    def receive(self, peer: Any, message: Any, payload: Buffer | None, now: float) -> None:
        if isinstance(message, Claim):
            self._claim(peer, message)
        elif isinstance(message, wire.Cancel):
            self._let_go(message.room, "The decode engine does not wait for it any more.")
        else:
            self._lent.pop(message.stamp, None)

    def tick(self, now: float) -> None:
        if now - self._ticked_s < TICK_S:
            return
        self._ticked_s = now
        self._lent = {stamp: loan for stamp, loan in self._lent.items() if now <= loan[0]}
        lent = {room.number: room for _, room, _ in self._lent.values()}
        for room in (lent | self._rooms).values():
            if room.claim is not None and not self._link.send(room.peer, wire.Beat(room.number)):
                self._let_go(room.number, "The decode engine is gone.")
            elif now > room.until_s and (room.claim is None or room.request is None):
                reason = "Only one of the two engines has got it in time (--disaggregation-claim-timeout-s)."
                if room.claim is not None:
                    self._link.send(room.peer, Failed(room.number, reason))
                self._let_go(room.number, reason)

    def _claim(self, peer: Any, claim: Claim) -> None:
        objection = self._identity.objection(claim.identity)
        chosen = [self._settings.disaggregation_transfer_backend, claim.backend]
        backend = max(chosen, key=lambda each: each != "auto")
        library, near = backend in LIBRARIES, claim.neighbours == wire.neighbours()
        on_gpu = near and self._transport.gpu in claim.gpus
        if chosen[0] != chosen[1] and (library or "auto" not in chosen):
            words = "The two engines were told to use different --disaggregation-transfer-backend"
            objection = f"{words} ({chosen[0]} and {chosen[1]})."
        elif backend == "shm" and not near:
            objection = "The two engines cannot share memory (another host or user); use the transfer backend tcp."
        elif backend == "cuda_ipc" and not on_gpu:
            reason = "another host, user or GPU, or none"
            objection = f"The two engines cannot share a GPU's memory ({reason}); use the transfer backend auto."
        known, beat = self._rooms.get(claim.room), wire.Beat(claim.room)
        if known is not None and known.peer not in (None, peer) and self._link.send(known.peer, beat):
            objection = "bootstrap_room must name one request: another decode engine waits for this one."
        if objection:
            self._link.send(peer, Failed(claim.room, objection, 400, "BadRequestError"))
            return
        if claim.request is not None and claim.request.media is not None and not near:
            self._link.send(peer, Failed(claim.room, "Its media lie in memory of another host.", here=True))
            return
        room = self._room(claim.room)
        room.claim, room.peer = msgspec.structs.replace(claim, request=None), peer
        if library or (backend != "tcp" and near):
            room.gpus = claim.gpus if on_gpu else ()
        if claim.request is not None:
            self._handle += 1
            self._of[self._handle] = room
            place = {"handle": self._handle, "stream": False, "bootstrap": Bootstrap(room=room.number)}
            self._link.requests.append(msgspec.structs.replace(claim.request, **place))
        self._begin(room)

    def _let_go(self, number: int, reason: str) -> None:
        self._lent = {stamp: loan for stamp, loan in self._lent.items() if loan[1].number != number}
        room = self._rooms.pop(number, None)
        if room is None:
            return
        self.counts["failed_transfers"] += 1
        if room.request is not None:
            self._passing.append((room.request, FinishAbort(reason, 504, "AbortError")))

    def _deliver(self) -> None:
        """The first parcel, once its copies are done."""
        parcel = self._parcels.popleft()
        room, message = parcel.room, parcel.message
        for ticket in parcel.tickets:
            ticket.wait()
        if self._rooms.get(room.number) is not room:
            return
        content = parcel.content
        if isinstance(message, Pages) and message.loan is not None and content is not None:
            until_s = self._clock() + self._settings.disaggregation_transfer_timeout_s
            self._lent[message.loan.stamp], content = (until_s, room, content), None
        for piece, body in self._pieces(message, content) if room.claim is not None else ():  # else nobody waits for it
            self._link.send(room.peer, piece, body)
        if isinstance(message, Failed) or (isinstance(message, Done) and not message.more):
            del self._rooms[room.number]
            self.counts["failed_transfers" if isinstance(message, Failed) else "transfers"] += 1

    def _pieces(self, message: Any, content: Buffer | None) -> Iterator[tuple[Any, Buffer | None]]:
        """Pages that go over connections: of full attention by so many bytes that all connections have some."""
        if not isinstance(message, Pages) or content is None:
            yield message, None
            return
        at = 0
        for part in message.parts:
            width = self._limits.copied_bytes(part.group)
            step = part.count if part.group else max(1, PIECE_BYTES // max(1, width))
            for first in range(0, part.count, step):
                piece = Part(part.group, part.first + first, min(step, part.count - first))
                size = piece.count * width
                yield msgspec.structs.replace(message, parts=[piece], size=size), content[at : at + size]
                at += size

    # -- pages ---------------------------------------------------------------------------------------------------------

    def launched(self, step: PlannedStep) -> None:
        while self._parcels:  # of the step before, for which the loop waits next: they must not wait for this one's
            self._deliver()
        for chunk in step.chunks if self._of else ():
            room = self._of.get(chunk.request.handle)
            if room is not None:
                self._send_chunk(room, chunk)

    def _send_chunk(self, room: Room, chunk: Chunk) -> None:
        """Whole pages. What a window or a state holds behind the whole prompt goes with its last chunk."""
        table, row, end = self._batch.table, chunk.request.row, min(chunk.first + chunk.count, room.tokens)
        first, whole = room.next_page, end // self._limits.page_size
        last = chunk.final and not chunk.request.started
        found: list[tuple[Part, IntArray]] = []
        if whole > first:
            found.append((Part(0, first, whole - first), table.pages[row, first:whole].copy()))
            room.next_page = whole
        for index, group in enumerate(self._batch.cache.groups if last else ()):
            if group.is_state:
                found.append((Part(index + 1, whole - 1, 1), table.group_pages[index][row, :1].copy()))
                continue
            needed = int(group.first_needed(np.array([end], dtype=np.int32))[0])
            begin = max(needed, int(table.group_first[index][row]))
            if begin < whole:
                pages = table.group_pages[index][row, begin:whole].copy()
                found.append((Part(index + 1, begin, whole - begin), pages))
        if found:
            self._pack(room, found)

    def _pack(self, room: Room, found: Sequence[tuple[Part, IntArray]]) -> None:
        size = sum(part.count * self._limits.copied_bytes(part.group) for part, _ in found)
        buffer, loan = (np.empty(size, np.uint8), None) if room.gpus is None else self._transport.lend(size, room.gpus)
        tickets, at = [], 0
        for part, pages in found:
            width = self._limits.copied_bytes(part.group)
            view = buffer[at : at + part.count * width].reshape(part.count, width)
            tickets.append(self._executor.control(CopyPagesOut(pages, view, part.group)))
            at += view.nbytes
        parts = [part for part, _ in found]
        message = Pages(room.number, parts, self.weight_version, loan, size)
        self._parcels.append(Parcel(room, message, tuple(tickets), buffer))
        self.counts["transferred_bytes"] += size

    # -- answers -------------------------------------------------------------------------------------------------------

    def tokens(self, message: Open | StepOutput | Ping | ProcessCommand) -> None:
        if isinstance(message, Open) and client_of(message.handle) == FOREIGN:
            return
        if isinstance(message, StepOutput) and self._of:
            self._hand_over(message)
        self._outbox.tokens(message)

    def _hand_over(self, step: StepOutput) -> None:
        """Requests end here with their first token, and what their grammars force around it, once that has logprobs."""
        reasons, started = {end.handle: end.reason for end in step.ended}, {each.handle: each for each in step.started}
        handles = np.frombuffer(step.handles, dtype=np.int64)
        owners = handles.repeat(np.frombuffer(step.counts, dtype=np.int32)) if step.counts else handles
        for handle in {*handles.tolist(), *reasons, *started} & self._of.keys():
            room, reason = self._of[handle], reasons.get(handle)
            tokens = np.frombuffer(step.tokens, dtype=np.int32)[owners == handle]
            if reason is None and len(tokens) and room.request is not None and not room.request.unsent:
                reason = FinishLength(len(tokens))
                step.ended.append(Ended(handle, reason, room.request.retractions))
                self._drop(room.request)
            if reason is not None:
                del self._of[handle]
            message: Done | Failed
            if isinstance(reason, FinishAbort):
                message = Failed(room.number, reason.message, reason.status_code, reason.err_type)
            else:
                scores, more = step.logprobs.get(handle), reason is None
                message = Done(room.number, tokens.tobytes(), started.get(handle), scores, more)
            self._parcels.append(Parcel(room, message))
