"""A prefill and a decode engine over fakes, joined by a wire that a test can cut; time is the test's."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from bough.core.parallel_settings import DisaggregationSettings
from bough.core.plan import Executor
from bough.core.settings import MemorySettings
from bough.disaggregation.decode import DecodeSide
from bough.disaggregation.prefill import PrefillSide
from bough.disaggregation.transports import Remote, Shared
from bough.disaggregation.wire import Identity, ToDecode, ToPrefill
from bough.messages.outputs import StepOutput
from bough.messages.requests import Bootstrap, Generate
from bough.scheduler.handover import Handover
from bough.scheduler.ports import Outbox
from bough.storage.tier import StoreBehind, StoreTier
from tests.fakes.executor import FakeExecutor
from tests.fakes.scheduler_bench import Bench

PATIENCE_S = 60.0
PREFILL = "prefill:8998"
HERE = Bootstrap("prefill", 8998)


@dataclass
class Wire:
    """Messages as they travel. While it is cut they are lost."""

    union: Any
    queue: deque[tuple[bytes, bytes | None]]
    cut: bool = False
    sent: int = 0  # bytes of pages

    def send(self, message: Any, payload: np.ndarray | None) -> None:
        if not self.cut:
            self.sent += 0 if payload is None else len(payload)
            self.queue.append((msgspec.msgpack.encode(message), None if payload is None else payload.tobytes()))


class FakeLink:
    """One engine's end. `send` says whether the other one is there."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.requests: list[Generate] = []
        self.gone = False

    def send(self, peer: Any, message: Any, payload: np.ndarray | None = None) -> bool:
        assert isinstance(peer, str | bytes), "ZeroMQ takes nothing else for an address"
        self.wire.send(message, payload)
        return not self.gone


class Deaf:
    """Like the detokenizer, it does not hear of requests that were not opened."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self.reply = out.reply

    def tokens(self, message: Any) -> None:
        if isinstance(message, StepOutput):
            handles, opened = np.frombuffer(message.handles, dtype=np.int64), self._out.opened
            counts = np.frombuffer(message.counts, np.int32) if message.counts else np.ones(len(handles), np.int32)
            known = np.array([handle in opened for handle in handles.tolist()], dtype=np.bool_)
            message = StepOutput(
                handles[known].tobytes(),
                np.frombuffer(message.tokens, dtype=np.int32)[known.repeat(counts)].tobytes(),
                counts[known].tobytes(),
                started=[each for each in message.started if each.handle in opened],
                ended=[each for each in message.ended if each.handle in opened],
                logprobs={handle: run for handle, run in message.logprobs.items() if handle in opened},
            )
        self._out.tokens(message)


class EnginePair:
    def __init__(
        self,
        make: Callable[[], FakeExecutor] = FakeExecutor,
        *,
        decode_executor: FakeExecutor | None = None,
        settings: DisaggregationSettings | None = None,
        home: Bootstrap | None = None,
        shared: bool = False,
        backend: str | None = None,
        transport: Callable[[], Remote] = lambda: Remote(Shared()),
        unlike: dict[str, Any] | None = None,
        memory: MemorySettings | None = None,
        tier: Callable[[Executor], StoreTier] | None = None,
        **scheduler: Any,
    ) -> None:
        """`backend`: the decode engine's, in the place of auto or tcp; `unlike`: in what its pages differ; `tier`: the
        store of each engine."""
        self.now, settings, self._shared = 0.0, settings or DisaggregationSettings(), shared
        self.to_prefill, self.to_decode = Wire(ToPrefill, deque()), Wire(ToDecode, deque())
        self.prefill_link, self.decode_link = FakeLink(self.to_decode), FakeLink(self.to_prefill)

        self.sides: dict[str, Any] = {}

        def over_store(name: str, executor: Executor, side: Handover) -> Handover:
            self.sides[name] = side
            return side if tier is None else StoreBehind(side, tier(executor))

        def prefill_side(executor: Executor, outbox: Outbox) -> tuple[Handover, Outbox]:
            parts = Deaf(outbox), self.prefill_link, identity_of(executor), settings, transport()
            side = PrefillSide(executor, *parts, clock=lambda: self.now)
            return over_store("prefill", executor, side), side

        def decode_side(executor: Executor, outbox: Outbox) -> tuple[Handover, Outbox]:
            identity = msgspec.structs.replace(identity_of(executor), **(unlike or {}))
            own = replace(settings, disaggregation_transfer_backend=backend or ("auto" if shared else "tcp"))
            side = DecodeSide(executor, outbox, self.decode_link, identity, own, transport(), home=home)
            return over_store("decode", executor, side), outbox

        self.prefill = Bench(make(), handover=prefill_side, **scheduler)
        self.decode = Bench(decode_executor or make(), handover=decode_side, memory=memory, **scheduler)
        self.alive = {"prefill": True, "decode": True}

    def ask(self, handle: int, prompt: list[int], **options: Any) -> None:
        self.decode.ask(handle, prompt, **({"bootstrap": HERE} | options))

    def carry(self) -> None:
        """Everything on the wires arrives. Shared memory is read by threads."""
        for wire, name, peer in ((self.to_prefill, "prefill", "decode"), (self.to_decode, "decode", PREFILL)):
            queue, wire.queue = wire.queue, deque()
            for header, payload in queue:
                content = None if payload is None else np.frombuffer(bytearray(payload), dtype=np.uint8)
                message = msgspec.msgpack.decode(header, type=wire.union)
                self.sides[name].receive(peer, message, content, self.now)
        if self._shared:
            arrived = (each for known in self.sides["decode"]._rooms.values() for each in known.arrived)
            assert not wait([pages for _, pages in arrived if pages is not None], PATIENCE_S).not_done
        self.prefill.submit(*self.prefill_link.requests)
        self.prefill_link.requests = []

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            for name, bench in (("prefill", self.prefill), ("decode", self.decode)):
                if self.alive[name]:
                    self.sides[name].tick(self.now)
                    bench.turn()
            self.carry()

    def wait(self, seconds: float) -> None:
        """Time goes by, in small steps."""
        for _ in range(int(seconds * 4)):
            self.now += 0.25
            self.turn(2)

    def kill(self, name: str) -> None:
        """Nothing comes from it, what is sent to it is lost, and its memory is gone."""
        self.alive[name] = False
        self.to_prefill.cut = self.to_decode.cut = True
        self.to_prefill.queue.clear()
        self.to_decode.queue.clear()
        if name == "decode":
            self.sides[name]._copies.clear()
            self.prefill_link.gone = True
        else:
            self.sides["decode"].lost(PREFILL)
            self.decode_link.gone = True

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            self.turn()
            if not any(self.left(name) for name in ("prefill", "decode") if self.alive[name]):
                return
        raise AssertionError("the pair does not come to rest")

    def left(self, name: str) -> int:
        """What an engine still has to do, or has kept for nothing."""
        bench = self.prefill if name == "prefill" else self.decode
        side, wires = self.sides[name], len(self.to_prefill.queue) + len(self.to_decode.queue)
        return len(bench.scheduler._requests) + len(side._rooms) + wires + len(bench.inbox.pending) + side.busy

    def used_pages(self) -> tuple[int, int]:
        """Pages of each engine that a request holds."""
        caches = [bench.scheduler._cache for bench in (self.prefill, self.decode)]
        return caches[0].pool.total - caches[0].available, caches[1].pool.total - caches[1].available


def identity_of(executor: Executor) -> Identity:
    limits = executor.limits()
    kinds = tuple(group.kind for group in limits.groups)
    return Identity("fake", "int32", limits.page_size, limits.page_bytes, kinds, limits.ranks)
