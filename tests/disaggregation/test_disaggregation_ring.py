"""Pages that stay on a GPU on their way: both sides of a pair, with memory of the host in the place of the GPU's."""

from __future__ import annotations

import gc
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from bough.core.errors import SettingsError
from bough.core.finish import FinishAbort
from bough.core.parallel_settings import DisaggregationSettings
from bough.core.settings import Settings
from bough.disaggregation import wire
from bough.disaggregation.transports import Remote, Ring, Shared, open_transport
from bough.disaggregation.wire import Loan
from bough.launch.disaggregation import device_memory
from bough.messages.requests import Abort, Bootstrap
from tests.disaggregation.test_disaggregation_pair import prompt_of
from tests.fakes.engine_pair import EnginePair
from tests.fakes.executor import FakeExecutor, oracle
from tests.fakes.lender import HostDevice

PATIENCE_S = 60.0
SIZE = {"pages": 1024, "chunk_tokens": 8, "context_length": 512}
PAGE_BYTES = FakeExecutor(**SIZE).limits().copied_bytes(0)
CHUNK_BYTES = 8 * PAGE_BYTES


class SlowDevice(HostDevice):
    """Reads once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.may.set()

    def read(self, place: bytes, into: np.ndarray) -> None:
        assert self.may.wait(PATIENCE_S)
        super().read(place, into)


class Pair(EnginePair):
    """The prefill engine was told the first transport, the decode engine the second."""

    def __init__(self, backends: tuple[str, str] = ("cuda_ipc", "cuda_ipc"), chunks: int = 64, **options: Any) -> None:
        self.devices = [SlowDevice(), SlowDevice()]
        given: list[Remote] = [Ring(device, chunks * CHUNK_BYTES or 1) for device in self.devices]
        settings = DisaggregationSettings(disaggregation_transfer_backend=backends[0])
        own = {"settings": settings, "backend": backends[1], "transport": iter(given).__next__, "shared": True}
        super().__init__(lambda: FakeExecutor(**SIZE), **(own | options))

    def used(self, name: str) -> int:
        """Parts of a ring that are in use."""
        gc.collect()
        ring = self.sides[name]._transport
        return len(ring._used) - len(ring._over)

    def ask_one(self, handle: int = 1) -> None:
        self.ask(handle, prompt_of(handle, 40), max_new_tokens=4)
        self.run()
        assert self.decode.out.outputs[handle] == oracle(prompt_of(handle, 40), 4)

    def at_rest(self) -> None:
        for side in self.sides.values():
            side.tick(self.now + 1.0)
        assert self.used_pages() == (0, 0) and (self.used("prefill"), self.used("decode")) == (0, 0)


@pytest.mark.parametrize("backends", [("cuda_ipc", "cuda_ipc"), ("auto", "auto"), ("cuda_ipc", "auto")])
def test_pages_stay_on_the_gpu_and_their_places_are_used_again(backends: tuple[str, str]) -> None:
    pair = Pair(backends, chunks=6)
    for handle in range(1, 9):
        pair.ask_one(handle)
    assert pair.to_decode.sent == 0 and pair.devices[1].reads >= 8 * 5, "nothing went over the connection"
    assert len(pair.devices[1].opened) == 1, "the memory is opened once"
    assert pair.decode.scheduler._committer.prefilled_tokens == 8, "the rest was handed over"
    pair.at_rest()


@pytest.mark.parametrize("chunks", [0, 1])
def test_what_has_no_place_there_goes_through_the_hosts_memory(chunks: int) -> None:
    pair = Pair(chunks=chunks)
    for handle in range(1, 5):
        pair.ask_one(handle)
    assert pair.to_decode.sent == 0 and (pair.devices[1].reads > 0) == bool(chunks)
    assert pair.decode.scheduler._committer.prefilled_tokens == 4
    pair.at_rest()


def test_an_engine_without_room_reads_into_the_hosts_memory() -> None:
    pair = Pair()
    pair.sides["decode"]._transport._size = 0
    pair.ask_one()
    assert pair.devices[1].reads >= 5 and pair.decode.scheduler._committer.prefilled_tokens == 1
    pair.at_rest()


def place_of(loan: Loan) -> int:
    """Where its part of the ring begins."""
    return int(msgspec.msgpack.decode(loan.on_gpu)[1])


def test_parts_lie_side_by_side_and_the_first_gap_is_taken() -> None:
    ring, reader = (Ring(HostDevice(), 1000) for _ in range(2))
    lent = [ring.lend(size, reader.gpus) for size in (300, 300, 400)]
    for number, (part, _) in enumerate(lent):
        part[:] = number
    assert [place_of(loan) for _, loan in lent] == [0, 300, 600]
    full, loan = ring.lend(10, reader.gpus)
    assert not loan.on_gpu and full.shape == (10,)
    for number, (part, loan) in enumerate(lent):
        assert (reader.read(loan, len(part)).result(PATIENCE_S) == number).all()
    late = lent.pop(1)[1]
    del part
    assert (reader.read(late, 300).result(PATIENCE_S) == 1).all(), "nothing has taken the place yet"
    (first, one), (second, two) = (ring.lend(150, reader.gpus) for _ in range(2))
    assert (place_of(one), place_of(two)) == (300, 450)
    first[:] = second[:] = 9
    with pytest.raises(OSError, match="another use"):
        reader.read(late, 300).result(PATIENCE_S)
    assert not ring.lend(100)[1].on_gpu, "a reader that cannot read its GPU's memory gets the host's"


# -- what fails --------------------------------------------------------------------------------------------------------


def lent_pair(**options: Any) -> Pair:
    """One of whose requests the pages are lent, but not read."""
    pair = Pair(**options)
    pair.devices[1].may.clear()
    pair._shared = False  # so that the test does not wait for reads
    pair.ask(1, prompt_of(1, 400), max_new_tokens=4)
    pair.turn(8)
    assert pair.used("prefill") > 1
    return pair


def test_a_decode_engine_that_dies_gives_everything_back_within_seconds() -> None:
    pair = lent_pair()
    pair.kill("decode")
    pair.wait(1.0)
    assert pair.used("prefill") == 0 and pair.used_pages()[0] == 0
    pair.devices[1].may.set()


def test_a_decode_engine_that_dies_behind_the_last_page_does_so_too() -> None:
    """The prefill engine has no room any more then, only loans."""
    pair = lent_pair()
    pair.turn(200)
    assert not pair.sides["prefill"]._rooms and pair.used("prefill") > 1
    pair.kill("decode")
    pair.wait(1.0)
    assert pair.used("prefill") == 0
    pair.devices[1].may.set()


@pytest.mark.parametrize("turns", [0, 200], ids=["meanwhile", "behind the last page"])
def test_a_client_that_leaves_gives_everything_back_at_once(turns: int) -> None:
    pair = lent_pair()
    pair.turn(turns)
    pair.decode.submit(Abort(1))
    pair.turn(4)
    assert pair.used("prefill") == 0
    pair.devices[1].may.set()
    pair.run()
    for thread in [each for each in threading.enumerate() if each.name == "bough-aside"]:
        thread.join(PATIENCE_S)
    pair.at_rest()


def test_a_prefill_engine_that_dies_is_forgotten() -> None:
    """Else its memory would stay taken as long as the decode engine lives."""
    pair = lent_pair()
    pair.devices[1].may.set()
    for thread in [each for each in threading.enumerate() if each.name == "bough-aside"]:
        thread.join(PATIENCE_S)
    assert pair.devices[1].opened
    pair.kill("prefill")
    pair.turn(4)
    assert not pair.devices[1].opened
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and reason.status_code == 503
    pair.sides["decode"].tick(pair.now + 1.0)
    assert pair.used("decode") == 0 and pair.used_pages()[1] == 0


def test_a_read_that_stalls_is_given_up() -> None:
    pair = lent_pair()
    pair.wait(32.0)
    reason = pair.decode.out.ended[1]
    assert isinstance(reason, FinishAbort) and "stalled" in reason.message
    assert pair.used("prefill") == 0
    pair.devices[1].may.set()
    pair.run()


def test_a_room_that_is_never_claimed_takes_nothing() -> None:
    pair = Pair()
    pair.prefill.ask(1, prompt_of(1, 40), bootstrap=Bootstrap(room=7))
    pair.wait(121.0)
    assert isinstance(pair.prefill.out.ended[1], FinishAbort)
    pair.at_rest()


# -- engines that cannot -----------------------------------------------------------------------------------------------


def test_engines_without_a_gpu_in_common_are_refused_when_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for backends, change in (
        (("cuda_ipc", "cuda_ipc"), lambda pair: setattr(pair.sides["decode"]._transport, "gpus", ("GPU-1",))),
        (("cuda_ipc", "auto"), lambda pair: setattr(pair.sides["decode"], "_transport", Remote(Shared()))),
        (("auto", "cuda_ipc"), lambda pair: setattr(pair.sides["prefill"], "_transport", Remote(Shared()))),
        (("cuda_ipc", "cuda_ipc"), lambda pair: monkeypatch.setattr(wire, "neighbours", iter("ab").__next__)),
    ):
        pair = Pair(backends)
        change(pair)
        pair.ask(1, prompt_of(1, 9))
        pair.run()
        reason = pair.decode.out.ended[1]
        assert isinstance(reason, FinishAbort) and reason.status_code == 400
        assert "cannot share a GPU's memory" in reason.message and "use the transfer backend auto" in reason.message
        assert pair.prefill.executor.computed_tokens == 0


@pytest.mark.parametrize("lacks", ["prefill", "decode"])
def test_auto_shares_the_hosts_memory_where_it_cannot_share_a_gpus(lacks: str) -> None:
    pair = Pair(("auto", "auto"))
    pair.sides[lacks]._transport = Remote(Shared())
    pair.ask_one()
    assert pair.to_decode.sent == 0 and pair.devices[1].reads == 0
    assert pair.decode.scheduler._committer.prefilled_tokens == 1


def test_a_gpu_that_cannot_lend_is_named_or_done_without(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(HostDevice):
        def allocate(self, size: int) -> Any:
            raise RuntimeError("CUDA error: operation not supported")

    with pytest.raises(SettingsError, match="backend cuda_ipc cannot start: CUDA error: operation not supported"):
        open_transport("cuda_ipc", Broken(), 100)
    assert not open_transport("auto", Broken(), 100).gpus
    assert "host's memory: CUDA error" in caplog.text


def test_an_engine_without_a_gpu_of_its_own_is_refused_at_the_start() -> None:
    flags = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "cuda-ipc", "device": "cpu"}
    limits = FakeExecutor(**SIZE).limits()
    with pytest.raises(SettingsError, match="cuda_ipc needs a GPU, and one alone; use auto"):
        device_memory(Settings.from_flat(flags), limits)
    assert device_memory(Settings.from_flat(flags | {"disaggregation_transfer_backend": "auto"}), limits) == (None, 0)


@pytest.mark.parametrize(
    ("mode", "backend", "chunks"),
    [
        ("prefill", "cuda-ipc", 2),
        ("decode", "auto", 2),
        ("auto", "cuda_ipc", 2),
        ("decode", "shm", 0),
        ("null", "auto", 0),
    ],
)
def test_a_gpu_keeps_memory_for_pages_on_their_way_only_in_a_pair(mode: str, backend: str, chunks: int) -> None:
    flags = {"disaggregation_mode": mode, "disaggregation_transfer_backend": backend}
    chosen = Settings.from_flat(flags).disaggregation
    assert chosen.device_chunks == chunks
    assert chosen.disaggregation_transfer_backend == backend.replace("-", "_")
