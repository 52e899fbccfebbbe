"""Memory that another engine reads: with real processes for each transport that is installed, and the two sides of a
pair with a library of which the test decides when a read ends, and how."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from bough.core.errors import SettingsError
from bough.core.finish import FinishAbort
from bough.core.parallel_settings import DisaggregationSettings
from bough.disaggregation.transports import Remote, open_transport
from bough.disaggregation.wire import Buffer, Loan
from tests.disaggregation.test_disaggregation_pair import prompt_of
from tests.fakes.engine_pair import EnginePair
from tests.fakes.executor import FakeExecutor, oracle
from tests.fakes.lender import lend, transport_of

PATIENCE_S = 120.0
NEEDS = {"shm": "mmap", "nixl": "nixl._api", "mooncake": "mooncake.engine", "ring": "mmap", "cuda_ipc": "torch"}


# -- each transport, between processes ---------------------------------------------------------------------------------


class Lender:
    def __init__(self, backend: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self.process = context.Process(target=lend, args=(other, backend), daemon=True)
        self.process.start()

    def lend(self, number: int, size: int) -> Loan:
        self._connection.send((number, size))
        assert self._connection.poll(PATIENCE_S)
        loan: Loan = self._connection.recv()
        return loan

    def take_back(self, number: int) -> None:
        self.lend(number, 0)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.gpu if name == "cuda_ipc" else ()) for name in NEEDS]
)
def backend(request: pytest.FixtureRequest) -> str:
    try:
        importlib.import_module(NEEDS[request.param])
    except ImportError as error:
        pytest.skip(f"{request.param} is not installed, or lacks a library: {error}")
    return str(request.param)


@pytest.fixture(scope="module")
def reader(backend: str) -> Remote:
    return transport_of(backend)


@pytest.fixture
def lender(backend: str) -> Iterator[Lender]:
    started = Lender(backend)
    yield started
    started.kill()


def test_what_is_lent_can_be_read_and_the_memory_serves_again(lender: Lender, reader: Remote) -> None:
    for number, size in enumerate((1000, 1 << 20, 3, (1 << 20) + 5, 1 << 20, 9 << 20), 1):
        place = lender.lend(number, size)
        found = [reader.read(place, size) for _ in range(3)]
        for each in found:
            content = each.result(PATIENCE_S)
            assert content.shape == (size,) and (content == number).all()
        lender.take_back(number)
    assert len(reader._places) <= 3 * 5, "those of one size"


def test_a_late_reader_never_gets_what_has_taken_the_place(lender: Lender, reader: Remote) -> None:
    places = [lender.lend(number, 5000) for number in (1, 2)]
    for number in (1, 2):
        lender.take_back(number)
    for number in (3, 4):  # in the memory, and under the file descriptors, of the others
        lender.lend(number, 5000)
    for place in places:
        assert reader.read(place, 5000).exception(PATIENCE_S) is not None
    assert (reader.read(lender.lend(5, 5000), 5000).result(PATIENCE_S) == 5).all()


def test_a_lender_that_dies_is_an_error_and_the_next_one_is_read(backend: str, lender: Lender, reader: Remote) -> None:
    size = 64 << 20
    place = lender.lend(1, size)
    before = reader.read(place, size)
    assert (before.result(PATIENCE_S) == 1).all()
    under_way = [reader.read(place, size) for _ in range(4)]
    lender.kill()
    for each in under_way:  # either way it ends, and what was read is right
        assert each.exception(PATIENCE_S) is not None or (each.result() == 1).all()
    assert reader.read(place, size).exception(PATIENCE_S) is not None
    other = Lender(backend)
    assert (reader.read(other.lend(2, size), size).result(PATIENCE_S) == 2).all()
    other.kill()


def test_a_place_that_makes_no_sense_is_an_error(reader: Remote) -> None:
    for loan in (Loan(b"nonsense", b""), Loan(b"", b"", b"nonsense")):
        assert reader.read(loan, 10).exception(PATIENCE_S) is not None


def test_a_library_that_cannot_start_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "mooncake"):
        monkeypatch.delitem(sys.modules, f"bough.disaggregation.{name}", raising=False)
        monkeypatch.setitem(sys.modules, NEEDS[name], None)
        with pytest.raises(SettingsError, match=f"backend {name} cannot start: .*{name}"):
            open_transport(name)


# -- both sides of a pair ----------------------------------------------------------------------------------------------


class Agent:
    """Reads within this process, once it may."""

    def __init__(self) -> None:
        self.memory: dict[bytes, Buffer] = {}
        self.may, self.reads, self.fails = threading.Event(), 0, False
        self.may.set()

    def allocate(self, size: int) -> tuple[Buffer, bytes]:
        memory: Buffer = np.empty(size, dtype=np.uint8)
        place = str(memory.ctypes.data).encode()
        self.memory[place] = memory
        return memory, place

    def read(self, place: bytes, into: Buffer) -> None:
        self.reads += 1
        assert self.may.wait(PATIENCE_S)
        if self.fails:
            raise RuntimeError("the cable is out")
        into[:] = self.memory[place][: into.size]


Make = Callable[..., tuple[EnginePair, Agent]]


@pytest.fixture
def make_pair() -> Iterator[Make]:
    agents = []

    def make(**options: Any) -> tuple[EnginePair, Agent]:
        agent = Agent()
        agents.append(agent)
        settings = DisaggregationSettings(disaggregation_transfer_backend="nixl")
        size = {"pages": 1024, "chunk_tokens": 8, "context_length": 512}
        parts = {"backend": "nixl", "transport": lambda: Remote(agent), **options}
        return EnginePair(lambda: FakeExecutor(**size), settings=settings, **parts), agent

    yield make
    for agent in agents:
        agent.may.set()


def settle(pair: EnginePair) -> None:
    """Reads end on threads of their own."""
    deadline = time.monotonic() + PATIENCE_S
    while pair.left("prefill") + pair.left("decode"):
        assert time.monotonic() < deadline
        pair.turn()
        time.sleep(0.0005)


def test_pages_go_through_a_library_and_its_memory_comes_back(make_pair: Make) -> None:
    pair, agent = make_pair()
    for handle in range(6):
        pair.ask(handle, prompt_of(handle, 40), max_new_tokens=4)
        settle(pair)
        assert pair.decode.out.outputs[handle] == oracle(prompt_of(handle, 40), 4)
    assert pair.to_decode.sent == 0 and agent.reads >= 6 * 5
    assert pair.decode.scheduler._committer.prefilled_tokens == 6, "the rest was handed over"
    gc.collect()
    sides = pair.sides["prefill"], pair.sides["decode"]
    assert not sides[0]._lent
    for side in sides:
        free = [memory.ctypes.data for each in side._transport._free.values() for memory in each]
        assert sorted(free) == sorted(side._transport._places) and len(free) <= 5 * 2, "used again"


def test_an_answer_waits_for_pages_that_are_still_read(make_pair: Make) -> None:
    pair, agent = make_pair()
    agent.may.clear()
    pair.ask(1, prompt_of(1, 40), max_new_tokens=4)
    pair.turn(50)
    assert agent.reads and not pair.left("prefill") and not pair.decode.out.outputs.get(1)
    agent.may.set()
    settle(pair)
    assert pair.decode.out.outputs[1] == oracle(prompt_of(1, 40), 4)
    assert pair.decode.scheduler._committer.prefilled_tokens == 1


def test_a_read_that_fails_is_an_error_that_another_pair_may_mend(make_pair: Make) -> None:
    pair, agent = make_pair()
    agent.fails = True
    pair.ask(1, prompt_of(1, 40), max_new_tokens=4)
    settle(pair)
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and reason.status_code == 503 and "the cable is out" in reason.message
    assert pair.used_pages() == (0, 0)


def test_a_read_that_does_not_end_is_given_up_though_its_engine_lives(make_pair: Make) -> None:
    pair, agent = make_pair()
    agent.may.clear()
    pair.ask(1, prompt_of(1, 400), max_new_tokens=4)  # its chunks are still computed for a while
    pair.wait(29.0)
    assert 1 not in pair.decode.out.ended
    pair.wait(3.0)
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and "stalled" in reason.message
    agent.may.set()
    pair.run()
    assert pair.used_pages() == (0, 0)


@pytest.mark.parametrize("backend", ["auto", "tcp", "mooncake"])
def test_both_engines_must_name_the_library(make_pair: Make, backend: str) -> None:
    pair, _ = make_pair(backend=backend)
    pair.ask(1, prompt_of(1, 40))
    pair.run()
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and reason.status_code == 400
    assert f"different --disaggregation-transfer-backend (nixl and {backend})" in reason.message
    assert pair.prefill.executor.computed_tokens == 0
