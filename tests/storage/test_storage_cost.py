"""After a restart an engine computes what takes longer to read, and reads what takes longer to compute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from bough.core.plan import BatchPlan
from bough.storage import tier as tier_module
from bough.storage.store import RUN_TOKENS
from tests.fakes.executor import Done, FakeExecutor
from tests.storage.test_storage_store import Kept
from tests.storage.test_storage_tier import Rig

COUNT = 12  # conversations


@dataclass(frozen=True)
class Machine:
    step_s: float  # what a step takes beside its tokens
    tokens_per_s: float
    token_bytes: int
    disk_bytes_per_s: float

    def compute_s(self, tokens: int) -> float:
        return self.step_s + tokens / self.tokens_per_s

    def read_s(self, tokens: int) -> float:
        return tokens * self.token_bytes / self.disk_bytes_per_s


H200 = Machine(0.004, 40_000, 131_072, 2.5e9)  # Llama-3.1-8B
SLOW_DISK = replace(H200, disk_bytes_per_s=0.8e9)
CPU = Machine(0.02, 300, 12_288, 1e9)  # a small model
SLOW_CPU = Machine(0.2, 40, 131_072, 0.5e9)


class TimedExecutor(FakeExecutor):
    machine: Machine

    def launch(self, plan: BatchPlan) -> Done:
        done = super().launch(plan)
        assert done.result is not None
        span = (1.0, 1.0 + self.machine.compute_s(int(plan.query_lens.sum())))
        return replace(done, result=replace(done.result, device_span=span))


class TimedKept(Kept):
    machine: Machine
    now = 0.0

    def read(self, key: str, *given: Any) -> bool:
        self.now += self.machine.read_s(RUN_TOKENS)
        return super().read(key, *given)


@dataclass
class Restart:
    """An engine that finds the conversations of another one on disk."""

    machine: Machine
    kept: TimedKept
    rig: Rig

    def found(self, length: int, number: int) -> bool:
        """Whether the prompt of this conversation came from the disk."""
        cached, storage = self.rig.ask(conversation(length, number))
        assert cached == (0 if storage is None else storage[0])
        return storage is not None


def conversation(length: int, number: int) -> list[int]:
    return [1 + (number + i) % 89 for i in range(length)]


def restart(machine: Machine, length: int, monkeypatch: pytest.MonkeyPatch) -> Restart:
    kept = TimedKept()
    kept.machine = TimedExecutor.machine = machine
    monkeypatch.setattr("tests.storage.test_storage_tier.FakeExecutor", TimedExecutor)
    monkeypatch.setattr(tier_module.time, "monotonic", lambda: kept.now)
    size = {"pages": 3 * length, "context_length": 2 * length, "chunk_tokens": 8192}
    first = Rig(kept, **size)
    for number in range(COUNT):
        first.ask(conversation(length, number))
    return Restart(machine, kept, Rig(kept, **size))


@pytest.mark.parametrize("length", [2000, 1800, 4000, 8000])
@pytest.mark.parametrize("machine", [H200, SLOW_DISK])
def test_a_fast_device_computes(machine: Machine, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt measures the disk."""
    assert machine.compute_s(length) < machine.read_s(length)
    engine = restart(machine, length, monkeypatch)
    assert [engine.found(length, number) for number in range(COUNT)] == [True] + [False] * (COUNT - 1)


@pytest.mark.parametrize("length", [2000, 1800])
@pytest.mark.parametrize("machine", [CPU, SLOW_CPU])
def test_a_slow_one_reads(machine: Machine, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.compute_s(length) > machine.read_s(length)
    engine = restart(machine, length, monkeypatch)
    assert all(engine.found(length, number) for number in range(COUNT))
