"""A decode engine as its scheduler sees it: a request waits until a prefill engine has computed its prompt.

Pages that arrive enter the radix tree like those of any other prompt, so nothing else knows where they were computed.
They are not locked. What memory has no room for, or an eviction takes before the request has its row, is computed here.
Then the request goes on behind its first token as one that was retracted does.
"""

import logging
import secrets
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from bough.constrained.interface import Ticket as GrammarTicket
from bough.core.control import CopyPagesIn, Ticket
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort, FinishLength
from bough.disaggregation import wire
from bough.disaggregation.link import Side
from bough.disaggregation.wire import Buffer, Claim, Done, Failed, Pages, Part
from bough.messages.outputs import Ended, StepOutput
from bough.messages.requests import Bootstrap, Generate
from bough.scheduler.intake import ending_of
from bough.scheduler.request import Request
from bough.scheduler.rows import Phase

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Receiving:
    request: Request
    peer: str
    own_choice: bool  # nobody named the prefill engine, so the prompt may be computed here as well
    heard_s: float | None = None  # when the prefill engine last said something of it that could be taken
    arrived: deque[tuple[Any, Future[Buffer] | None]] = field(default_factory=deque)


class DecodeSide(Side):
    """`home` is the prefill engine of requests that name none (--prefill-url)."""

    def __init__(self, *parts: Any, home: Bootstrap | None = None) -> None:
        super().__init__(*parts)
        self._home = home
        self._rooms: dict[int, Receiving] = {}
        self._copies: list[tuple[Ticket, Buffer]] = []  # by what is still read

    @property
    def busy(self) -> bool:
        return any(known.arrived for known in self._rooms.values())

    # -- requests ------------------------------------------------------------------------------------------------------

    def check(self, message: Generate) -> None:
        if message.bootstrap is not None and not message.bootstrap.host and self._home is None:
            raise RequestError("bootstrap_host is missing: it names the prefill engine.", field="bootstrap_host")

    def enter(self, request: Request, message: Generate, ticket: GrammarTicket | None) -> bool:
        given, home = message.bootstrap, self._home
        where = given if given is not None and given.host else home
        borrows = where is not given and self._settings.disaggregation_mode == "auto"
        if where is None or self.stays(message) or (borrows and not self._step_is_full):
            return False
        routed = None if given is None else given.room  # then a router has sent the request there
        room = secrets.randbits(63) if routed is None else routed
        if room in self._rooms:
            return False
        self[request] = ticket
        host = f"[{where.host}]" if ":" in where.host else where.host
        cache, key = self._batch.cache, (request.tokens, request.namespace)
        cache.unlock(cache.fetch(cache.match_and_lock(*key), *key, None))  # what the host has need not come from there
        receiving = self._rooms[room] = Receiving(request, f"{host}:{where.port}", own_choice=given is None)
        claim = Claim(
            room,
            self._identity,
            cache.tree.match_length(*key),
            wire.digest_of(request),
            msgspec.structs.replace(message, bootstrap=None, names=(), made_at=0.0) if routed is None else None,
            wire.neighbours(),
            self._settings.disaggregation_transfer_backend,
            self._transport.gpus,
        )
        if not self._link.send(receiving.peer, claim):
            self._fail(room, Failed(room, f"There is no prefill engine at {receiving.peer}."))
        return True

    @property
    def _step_is_full(self) -> bool:
        """Whether prompts that wait here fill the next step: one more would wait for another."""
        table = self._batch.table
        begun = (table.known - table.length)[table.phase == Phase.PREFILL].sum()
        return bool(begun + sum(len(request.tokens) for request in self._queue) >= self._limits.chunk_tokens)

    def leave(self, request: Request) -> None:
        super().leave(request)
        for room, known in [each for each in self._rooms.items() if each[1].request is request]:
            del self._rooms[room]
            self._link.send(known.peer, wire.Cancel(room))

    # -- prefill engines -----------------------------------------------------------------------------------------------

    def receive(self, peer: str, message: Any, payload: Buffer | Future[Buffer] | None, now: float) -> None:
        known = self._rooms.get(getattr(message, "room", -1))
        if known is None:
            return
        pages = payload if isinstance(payload, Future) else None
        if isinstance(payload, np.ndarray):
            pages = Future()
            pages.set_result(payload)
        elif isinstance(message, Pages) and message.loan is not None:
            pages = self._transport.read(message.loan, message.size)
        known.arrived.append((message, pages))
        self._take(message.room, known, now)

    def _take(self, room: int, known: Receiving, now: float) -> None:
        """What has arrived, in order, up to pages that are still being read."""
        while known.arrived and self._rooms.get(room) is known:
            message, pages = known.arrived[0]
            if pages is not None and not pages.done():
                return
            known.arrived.popleft()
            known.heard_s = now
            if isinstance(message, Pages) and pages is not None:
                self._take_pages(known, message, pages)
            elif isinstance(message, Failed):
                self._fail(message.room, message)
            elif isinstance(message, Done):
                self._take_answer(known.request, message)

    def lost(self, peer: str) -> None:
        self._transport.forget()
        for room in [room for room, known in self._rooms.items() if known.peer == peer]:
            self._fail(room, Failed(room, f"The prefill engine at {peer} is gone."))

    def tick(self, now: float) -> None:
        self._copies = [copy for copy in self._copies if not copy[0].ready()]
        patience_s = self._settings.disaggregation_transfer_timeout_s
        for room, known in list(self._rooms.items()):
            self._take(room, known, now)
            if known.heard_s is None:
                known.heard_s = now
            elif room in self._rooms and now - known.heard_s > patience_s:
                self._link.send(known.peer, wire.Cancel(room))
                self._fail(room, Failed(room, "The transfer has stalled (--disaggregation-transfer-timeout-s)."))

    def _fail(self, room: int, failed: Failed) -> None:
        self.counts["failed_transfers"] += 1
        known = self._rooms.pop(room)
        if failed.here or (known.own_choice and failed.status_code >= 500):
            log.warning("a prompt is computed here: %s", failed.reason)
            self._passing.append((known.request, None))
            return
        self._passing.append((known.request, FinishAbort(failed.reason, failed.status_code, failed.err_type)))

    def _take_answer(self, request: Request, done: Done) -> None:
        """The caller gets the first token as from any engine. The request may be over with it."""
        if done.started is not None and done.started.weight_version != self.weight_version:
            self._fail(done.room, Failed(done.room, "The prefill engine has other weights."))
            return
        output = np.frombuffer(done.tokens, dtype=np.int32)
        request.take_over(output)
        generated = request.tokens[request.prompt_len :]
        reason = ending_of(generated, request) if request.max_new else FinishLength(0)
        handle = np.array([request.handle], dtype=np.int64).tobytes()
        started = [] if done.started is None else [msgspec.structs.replace(done.started, handle=request.handle)]
        self._outbox.tokens(
            StepOutput(
                handle if len(output) else b"",
                done.tokens,
                np.array([len(output)], dtype=np.int32).tobytes() if len(output) else b"",
                started,
                [] if reason is None else [Ended(request.handle, reason, 0)],
                {} if done.logprobs is None else {request.handle: done.logprobs},
            )
        )
        if reason is None and done.more:
            return
        del self._rooms[done.room]
        self.counts["transfers"] += 1
        if reason is None:
            self._passing.append((request, None))
        else:
            super().leave(request)
            self._drop(request)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def _take_pages(self, known: Receiving, message: Pages, pages: Future[Buffer]) -> None:
        if error := pages.exception():
            self._link.send(known.peer, wire.Cancel(message.room))
            self._fail(message.room, Failed(message.room, f"Shared memory cannot be read ({error}); use tcp."))
            return
        payload = pages.result()
        if message.loan is not None:
            self._link.send(known.peer, wire.Mapped(message.loan.stamp))
        if message.weight_version != self.weight_version:
            return  # computed with other weights
        self.counts["transferred_bytes"] += len(payload)
        request, at = known.request, 0
        for part in message.parts:
            width = self._limits.copied_bytes(part.group)
            content = payload[at : at + part.count * width].reshape(part.count, width)
            at += content.nbytes
            self._copies += [(ticket, payload) for ticket in self._store(request, part, content)]

    def _store(self, request: Request, part: Part, content: Buffer) -> Iterator[Ticket]:
        cache, end = self._batch.cache, part.first + part.count
        key = request.tokens[: end * cache.page_size]
        known = len(cache.tree.pages_of(key, request.namespace)[0])
        if known < (end if part.group else part.first):
            return  # the tokens before these are gone
        state = cache.groups[part.group - 1] if part.group and cache.groups[part.group - 1].is_state else None
        if state is not None and state.available <= self._batch.table.free_rows:
            return  # each row needs one
        offered = [np.zeros(end, dtype=np.int32) for _ in (None, *cache.groups)]
        offered[part.group][part.first :] = np.arange(1, part.count + 1)
        for group, places, pages in cache.place(key, request.namespace, offered, whole=True, priority=request.priority):
            yield self._executor.control(CopyPagesIn(pages, content, group, places - 1))
