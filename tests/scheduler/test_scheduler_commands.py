"""Commands to the scheduler: pause and go on, ping, abort by name, profiles."""

from __future__ import annotations

import pytest

from bough.core.control import Command, CommandResult, ProfileStart
from bough.core.errors import RequestError
from bough.core.finish import FinishAbort, FinishLength
from bough.messages.outputs import Open, StepOutput
from bough.messages.requests import (
    Abort,
    ChangeSettings,
    FlushCache,
    GetState,
    PauseMode,
    Ping,
    Resume,
    StartProfile,
    StopProfile,
)
from bough.messages.requests import Pause as PauseMessage
from bough.scheduler.control import Recording
from tests.fakes.executor import FakeExecutor, FakeTicket
from tests.fakes.scheduler_bench import Bench


def alone(prompt: list[int], n: int) -> list[int]:
    bench = Bench()
    bench.ask(1, prompt, max_new_tokens=n)
    bench.run()
    return bench.out.outputs[1]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_stops_everything_and_loses_nothing(mode: PauseMode) -> None:
    bench = Bench()
    bench.ask(1, [1, 2, 3], max_new_tokens=12)
    bench.turn(4)
    bench.submit(PauseMessage(7, mode))
    bench.turn()
    assert bench.out.replies[-1].call == 7 and bench.out.replies[-1].ok
    seen = list(bench.out.outputs[1])
    bench.ask(2, [4, 5], max_new_tokens=3)
    bench.submit(FlushCache(8))
    bench.turn(3)
    assert bench.out.outputs[1] == seen and not bench.out.outputs[2] and not bench.out.ended
    assert bench.out.replies[-1].ok == (mode == "retract")
    bench.submit(Resume(9))
    bench.run()
    assert bench.out.outputs[1] == alone([1, 2, 3], 12) and bench.out.outputs[2] == alone([4, 5], 3)
    assert bench.out.ended[1] == FinishLength(12)


def test_a_pause_may_end_what_runs_and_keeps_what_comes() -> None:
    bench = Bench()
    bench.ask(1, [1, 2, 3], max_new_tokens=50)
    bench.turn(3)
    bench.submit(PauseMessage(7))
    bench.ask(2, [4], max_new_tokens=2)
    bench.turn(2)
    assert isinstance(bench.out.ended[1], FinishAbort) and 2 not in bench.out.ended
    bench.submit(Abort(2))
    bench.turn()
    assert isinstance(bench.out.ended[2], FinishAbort)


def test_an_abort_by_name_means_exactly_that_request_or_its_call() -> None:
    bench = Bench()
    for handle, rid, names in ((1, "job", ()), (2, "job-2", ()), (3, "many-0", ("many",)), (4, "many-1", ("many",))):
        bench.ask(handle, [handle], max_new_tokens=50, rid=rid, names=names)
    bench.turn(2)
    bench.submit(Abort(name="job"), Abort(name="nobody"))
    bench.turn()
    assert bench.out.ended.keys() == {1}
    bench.submit(Abort(name="many"))
    bench.turn()
    assert bench.out.ended.keys() == {1, 3, 4}
    bench.submit(Abort())
    bench.turn()
    assert bench.out.ended.keys() == {1, 2, 3, 4}


def test_a_ping_is_handed_on() -> None:
    bench = Bench()
    passed: list[object] = []
    bench.out.tokens = lambda message: passed.append(message)  # type: ignore[method-assign]
    bench.submit(Ping(5))
    bench.turn()
    assert passed == [Ping(5)] and not any(isinstance(m, Open | StepOutput) for m in passed)


def test_a_full_queue_is_what_the_changed_setting_says() -> None:
    bench = Bench()
    bench.submit(ChangeSettings(5, {"max_queued_requests": 0}), GetState(6))
    bench.turn()
    state = bench.out.replies[-1].data
    assert state["max_queued_requests"] == state["live_settings"]["max_queued_requests"] == 0
    bench.ask(1, [1, 2], max_new_tokens=2)
    bench.turn()
    reason = bench.out.ended[1]
    assert isinstance(reason, FinishAbort) and reason.status_code == 429


class ProfiledExecutor(FakeExecutor):
    """Notes what it is told; refuses what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.refuse = ""
        self.defect: Exception | None = None

    def control(self, command: Command) -> FakeTicket:
        if self.refuse:
            return FakeTicket(RequestError(self.refuse))
        if self.defect is not None:
            raise self.defect
        self.log.append(f"start {command.output_dir}" if isinstance(command, ProfileStart) else "stop")
        return FakeTicket(CommandResult("trace.json"))


def test_a_recording_covers_the_steps_that_were_asked_for() -> None:
    profiler = ProfiledExecutor()
    recording = Recording(profiler)
    assert recording.obey(StartProfile(1, 2, 3, ProfileStart(output_dir="o"))).ok
    assert not recording.obey(StartProfile(call=2)).ok
    for expected in ([], ["start o"], ["start o"], ["start o"], ["start o", "stop"], ["start o", "stop"]):
        recording.after_step()
        assert profiler.log == expected
    assert not recording.obey(StopProfile(3)).ok


def test_a_recording_goes_on_until_it_is_stopped_or_the_engine_is() -> None:
    profiler = ProfiledExecutor()
    recording = Recording(profiler)
    assert recording.obey(StartProfile(call=1)).ok
    recording.after_step()
    assert not recording.obey(StartProfile(call=2)).ok
    assert "trace.json" in recording.obey(StopProfile(3)).message
    profiler.refuse = "no such activity"
    assert recording.obey(StartProfile(call=4)).message == "no such activity"
    profiler.refuse = ""
    assert recording.obey(StartProfile(call=5)).ok
    recording.close()
    assert profiler.log == ["start None", "stop", "start None", "stop"]


@pytest.mark.parametrize("defect", [AssertionError("no activities"), ValueError("embedded null byte"), KeyError()])
@pytest.mark.parametrize("delay", [0, 1])
def test_a_profiler_that_fails_harms_nobody(defect: Exception, delay: int) -> None:
    profiler = ProfiledExecutor()
    recording = Recording(profiler)
    profiler.defect = defect
    assert recording.obey(StartProfile(call=1, start_step=delay)).ok == bool(delay)
    recording.after_step()
    profiler.defect = None
    assert recording.obey(StartProfile(call=2, num_steps=1)).ok
    profiler.defect = defect
    recording.after_step()
    profiler.defect = None
    assert recording.obey(StartProfile(call=3)).ok
    profiler.defect = defect
    reply = recording.obey(StopProfile(4))
    assert not reply.ok and reply.message.startswith("The profiler failed: ")
