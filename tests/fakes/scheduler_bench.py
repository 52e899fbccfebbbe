"""A scheduler wired to fakes, with the audit run after every turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bough.core.plan import Executor, HostMemory
from bough.core.settings import LoraSettings, MemorySettings, SchedulerSettings
from bough.messages.requests import ToScheduler
from bough.observability.timeline import Timeline
from bough.scheduler.adapters import Adapters
from bough.scheduler.handover import Handover
from bough.scheduler.loop import Scheduler
from bough.scheduler.ports import CacheEvents, Grammars, Outbox, Proposer
from tests.fakes.boxes import FakeInbox, FakeOutbox, generate
from tests.fakes.executor import FakeExecutor


class Bench:
    """`submit` messages, `turn` the loop, look at `out`."""

    def __init__(
        self,
        executor: FakeExecutor | None = None,
        *,
        eos_ids: tuple[int, ...] = (),
        memory: MemorySettings | None = None,
        events: CacheEvents | None = None,
        timeline: Timeline | None = None,
        grammars: Grammars | None = None,
        proposer: Proposer | None = None,
        host_pages: tuple[int, ...] | None = None,
        host: HostMemory | None = None,
        lora: LoraSettings | None = None,
        handover: Callable[[Executor, Outbox], tuple[Handover, Outbox]] | None = None,
        **settings: Any,
    ) -> None:
        self.executor = executor or FakeExecutor()
        self.inbox, self.out = FakeInbox(), FakeOutbox()
        self.now = 0.0
        limits = self.executor.limits()
        if host_pages is not None:
            sizes = (limits.copied_bytes(group) for group in range(len(limits.groups)))
            host = [np.zeros((n + 1, size), dtype=np.uint8) for n, size in zip(host_pages, sizes, strict=True)]
        side, outbox = (None, self.out) if handover is None else handover(self.executor, self.out)
        self.scheduler = Scheduler(
            self.executor,
            self.inbox,
            outbox,
            memory=memory or MemorySettings(),
            settings=SchedulerSettings(**settings),
            eos_ids=eos_ids,
            events=events,
            timeline=timeline,
            grammars=grammars,
            proposer=proposer,
            host=host,
            handover=side,
            adapters=None if lora is None else Adapters(self.executor, lora),
            clock=lambda: self.now,
        )

    def submit(self, *messages: ToScheduler) -> None:
        self.inbox.pending += messages

    def ask(self, handle: int, prompt: list[int], **options: Any) -> None:
        self.submit(generate(handle, prompt, **options))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.scheduler.turn()
            self.check()

    def run(self, limit: int = 5000) -> None:
        """Until nothing is left to do."""
        before = self.inbox.idle_waits
        for _ in range(limit):
            self.turn()
            if self.inbox.idle_waits > before:
                return
        raise AssertionError("the scheduler does not come to rest")

    def check(self) -> None:
        s = self.scheduler
        audit = s._batch.audit()
        assert not audit.problems, audit.problems
