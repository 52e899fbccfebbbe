"""Who is in which room: what each side knows of the other, without sockets or threads.

A desk gets messages from peers (`receive`), orders from its scheduler (`obey`) and the time (`tick`). It sends through
`send(peer, message, payload)` and tells its scheduler through `tell(news)`. Silence of a peer ends its rooms.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from bough.core.settings import DisaggregationSettings
from bough.disaggregation.wire import (
    UNAVAILABLE,
    Alive,
    Buffer,
    Cancel,
    Claim,
    Done,
    Failed,
    Heard,
    Identity,
    Mapped,
    Pages,
    SharedMemory,
    ToDecode,
    ToPrefill,
    open_shared,
)
from bough.messages.channels import first_handle
from bough.messages.requests import Bootstrap, Generate

BEAT_S = 1.0  # between two signs of life
REMEMBERED = 10_000  # rooms that have ended: a late claim does not open them again
FOREIGN = 1 << 14  # the client number of requests that decode engines bring

Peer = TypeVar("Peer")
Send = Callable[[Any, Any, Buffer | None], None]


@dataclass(frozen=True, slots=True)
class Claimed:
    claim: Claim
    shared: bool  # pages go through shared memory
    handle: int = 0  # of the request, if it has brought one


@dataclass(frozen=True, slots=True)
class Left:
    """Nobody waits for the room any more, or nobody has claimed it."""

    room: int
    reason: str


@dataclass(frozen=True, slots=True)
class Expect:
    """A router has sent the request of this room."""

    room: int


@dataclass(frozen=True, slots=True)
class Forget:
    room: int


@dataclass(frozen=True, slots=True)
class Say:
    """The last word on a room, or pages."""

    message: Pages | Done | Failed
    content: Buffer | SharedMemory | None = None


PrefillNews = Claimed | Left | Generate


@dataclass(slots=True)
class PrefillRoom(Generic[Peer]):
    peer: Peer
    heard_s: float


class PrefillDesk(Generic[Peer]):
    def __init__(
        self, identity: Identity, settings: DisaggregationSettings, send: Send, tell: Callable[[PrefillNews], None]
    ) -> None:
        self._identity, self._settings, self._send, self._tell = identity, settings, send, tell
        self._rooms: dict[int, PrefillRoom[Peer]] = {}
        self._expected: dict[int, float] = {}  # until when, by room
        self._ended: OrderedDict[int, None] = OrderedDict()
        # By descriptor: until when it may be opened. A decode engine that lives does so at once.
        self._shared: dict[int, tuple[float, SharedMemory]] = {}
        self._handle = first_handle(FOREIGN)

    def receive(self, peer: Peer, message: ToPrefill, payload: Buffer | None, now: float) -> None:
        match message:
            case Claim():
                self._claim(peer, message, now)
            case Alive():
                for room in message.rooms:
                    if room in self._rooms:
                        self._rooms[room].heard_s = now
                    elif room not in self._ended:
                        self._send(peer, Failed(room, "The prefill engine does not know the request any more."), None)
                self._send(peer, Heard([]), None)
            case Cancel():
                self._leave(message.room, "The decode engine does not wait for it any more.")
            case Mapped():
                self._close_shared([message.fd])

    def obey(self, order: Expect | Forget | Say, now: float) -> None:
        match order:
            case Expect():
                self._expected[order.room] = now + self._settings.disaggregation_claim_timeout_s
            case Forget():
                self._expected.pop(order.room, None)
            case Say():
                self._say(order, now)

    def tick(self, now: float) -> None:
        silence_s = self._settings.disaggregation_peer_timeout_s
        for room in [room for room, known in self._rooms.items() if now - known.heard_s > silence_s]:
            self._leave(room, f"The decode engine was silent for {silence_s:g} s.")
        self._close_shared([fd for fd, (until, _) in self._shared.items() if now > until])
        for room in [room for room, until in self._expected.items() if now > until]:
            del self._expected[room]
            self._tell(Left(room, "No decode engine has claimed it in time (--disaggregation-claim-timeout-s)."))

    def _claim(self, peer: Peer, claim: Claim, now: float) -> None:
        room = claim.room
        if room in self._ended:
            return
        objection = self._identity.objection(claim.identity)
        choices = {self._settings.disaggregation_transfer_backend, claim.backend} - {"auto"}
        shared = claim.probe is not None and choices != {"tcp"} and claim.probe.readable()
        if len(choices) > 1:
            objection = "The two engines were told to use different --disaggregation-transfer-backend."
        elif "shm" in choices and not shared:
            objection = "The two engines cannot share memory (another host or user); use the transfer backend tcp."
        if objection:
            self._send(peer, Failed(room, objection, 400, "BadRequestError"), None)
            return
        self._send(peer, Heard([room]), None)
        if room in self._rooms:
            self._rooms[room].heard_s = now
            return
        self._rooms[room] = PrefillRoom(peer, now)
        self._expected.pop(room, None)
        self._handle += 1
        self._tell(Claimed(msgspec.structs.replace(claim, request=None), shared, self._handle))
        if claim.request is not None:
            here = Bootstrap(room=room)
            self._tell(msgspec.structs.replace(claim.request, handle=self._handle, stream=False, bootstrap=here))

    def _say(self, order: Say, now: float) -> None:
        message, content, room = order.message, order.content, self._rooms.get(order.message.room)
        if isinstance(content, SharedMemory):
            self._shared[content.fd] = now + self._settings.disaggregation_peer_timeout_s, content
            content = None
        if room is not None:
            self._send(room.peer, message, content)
        if not isinstance(message, Pages):
            self._rooms.pop(message.room, None)
            self._end(message.room)

    def _leave(self, room: int, reason: str) -> None:
        if self._rooms.pop(room, None) is not None:
            self._tell(Left(room, reason))
        self._end(room)

    def _close_shared(self, descriptors: Sequence[int]) -> None:
        for fd in descriptors:
            _, memory = self._shared.pop(fd, (0.0, None))
            if memory is not None:
                memory.close()

    def _end(self, room: int) -> None:
        self._ended[room] = None
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)


@dataclass(frozen=True, slots=True)
class Ask(Generic[Peer]):
    """Claim a room at that engine."""

    peer: Peer
    claim: Claim


@dataclass(frozen=True, slots=True)
class Arrived:
    pages: Pages
    content: Buffer


DecodeNews = Arrived | Done | Failed


@dataclass(slots=True)
class DecodeRoom(Generic[Peer]):
    peer: Peer
    claim: Claim | None  # until it is heard
    progress_s: float | None = None  # when the last pages came


class DecodeDesk(Generic[Peer]):
    def __init__(self, settings: DisaggregationSettings, send: Send, tell: Callable[[DecodeNews], None]) -> None:
        self._settings, self._send, self._tell = settings, send, tell
        self._rooms: dict[int, DecodeRoom[Peer]] = {}
        self._heard: dict[Peer, float] = {}  # when each engine that owes an answer last gave a sign
        self._beat_s = 0.0

    def obey(self, order: Ask[Peer] | Cancel, now: float) -> None:
        if isinstance(order, Cancel):
            self._drop(order.room)
            return
        self._heard.setdefault(order.peer, now)
        self._rooms[order.claim.room] = DecodeRoom(order.peer, order.claim)
        self._send(order.peer, order.claim, None)

    def receive(self, peer: Peer, message: ToDecode, payload: Buffer | None, now: float) -> None:
        if peer in self._heard:
            self._heard[peer] = now
        if isinstance(message, Heard):
            for heard in message.rooms:
                if heard in self._rooms:
                    self._rooms[heard].claim = None
            return
        room = self._rooms.get(message.room)
        if room is None:
            return
        if isinstance(message, Pages):
            room.claim, room.progress_s = None, now
            self._take(peer, message, payload)
            return
        self._end(message.room)
        self._tell(message)

    def tick(self, now: float) -> None:
        settings = self._settings
        silent = [peer for peer, at in self._heard.items() if now - at > settings.disaggregation_peer_timeout_s]
        for number, room in list(self._rooms.items()):
            if room.peer in silent:
                self._fail(number, f"The prefill engine at {room.peer} does not answer.")
            elif room.progress_s is not None and now - room.progress_s > settings.disaggregation_transfer_timeout_s:
                self._fail(number, "The transfer has stalled (--disaggregation-transfer-timeout-s).")
        if now - self._beat_s < BEAT_S:
            return
        self._beat_s = now
        waiting: dict[Peer, list[int]] = {}
        for number, room in self._rooms.items():
            if room.claim is not None:
                self._send(room.peer, room.claim, None)
            else:
                waiting.setdefault(room.peer, []).append(number)
        for peer, rooms in waiting.items():
            self._send(peer, Alive(rooms), None)

    def _take(self, peer: Peer, pages: Pages, payload: Buffer | None) -> None:
        if pages.fd >= 0:
            try:
                payload = open_shared(pages)
            except OSError as error:
                self._fail(pages.room, f"Its shared memory cannot be read ({error}); use the transfer backend tcp.")
                return
            self._send(peer, Mapped(pages.fd), None)
        assert payload is not None
        self._tell(Arrived(pages, payload))

    def _fail(self, room: int, reason: str) -> None:
        self._drop(room)
        self._tell(Failed(room, reason, 503, UNAVAILABLE))

    def _drop(self, number: int) -> None:
        room = self._end(number)
        if room is not None:
            self._send(room.peer, Cancel(number), None)

    def _end(self, number: int) -> DecodeRoom[Peer] | None:
        room = self._rooms.pop(number, None)
        if room is not None and all(other.peer != room.peer for other in self._rooms.values()):
            self._heard.pop(room.peer, None)  # it owes nothing: hours may pass
        return room
