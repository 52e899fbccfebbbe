"""The step trace: what viewers need to find in it, over a fake executor and over real engines, ended well and badly."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from bough import Engine, EngineDeadError
from bough.core.errors import SettingsError
from bough.core.plan import BatchPlan
from bough.observability.step_trace import DEVICE_LANE, HOST_LANE, StepTrace, default_trace_path, name_batch
from tests.fakes.executor import Done, FakeExecutor
from tests.fakes.scheduler_bench import Bench

PHASES = {"messages", "idle", "plan", "launch", "wait", "commit"}


class TickingClock:
    """Every look at it is a millisecond later than the one before."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


class TimedExecutor(FakeExecutor):
    """Says when it ran, by the given clock."""

    def __init__(self, clock: TickingClock) -> None:
        super().__init__()
        self._clock = clock

    def launch(self, plan: BatchPlan) -> Done:
        began = self._clock()
        done = super().launch(plan)
        return Done(replace(done.result, device_span=(began, self._clock())))


def lane(events: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """What lasted, in the order in which it began; what contains another comes first."""
    found = [e for e in events if e["ph"] == "X" and e["tid"] == number]
    return sorted(found, key=lambda e: (e["ts"], -e["dur"]))


def check_nesting(events: list[dict[str, Any]], slack_us: float = 0.01) -> None:
    """Each event begins after its neighbour has ended, or lies inside it."""
    open_until: list[float] = []
    for event in events:
        assert event["dur"] >= 0 and event["ts"] >= 0
        while open_until and open_until[-1] <= event["ts"] + slack_us:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1] + slack_us, event
        open_until.append(end)


def check_trace(events: list[dict[str, Any]]) -> None:
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {HOST_LANE: "scheduler loop", DEVICE_LANE: "device"}
    host, device = lane(events, HOST_LANE), lane(events, DEVICE_LANE)
    check_nesting(host)
    check_nesting(device)
    assert {e["name"] for e in host} == PHASES
    for before, after in pairwise(device):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.01, "one step at a time is on the device"
    launched = [e["args"]["step"] for e in host if e["name"] == "launch"]
    assert launched == [e["args"]["step"] for e in device] == [e["args"]["step"] for e in host if e["name"] == "commit"]


def read_cut(path: Path) -> list[dict[str, Any]]:
    """What a viewer makes of an array without an end."""
    return json.loads(path.read_text() + "\n]")  # type: ignore[no-any-return]


def test_the_loop_shows_what_it_does(tmp_path: Path) -> None:
    clock = TickingClock()
    trace = StepTrace(tmp_path / "deep" / "trace.json", clock)
    bench = Bench(TimedExecutor(clock), timeline=trace)
    for handle in range(3):
        bench.ask(handle, [handle + 1] * 10, max_new_tokens=8)
    bench.run()
    assert read_cut(trace.path), "everything is in the file while it is still open"
    trace.close()
    trace.close()
    events = json.loads(trace.path.read_text())
    check_trace(events)
    device = lane(events, DEVICE_LANE)
    assert device[0]["name"] == "16 prompt tokens" and device[0]["args"]["decodes"] == 0
    assert any(e["name"] == "3 decodes" for e in device)


def test_a_step_is_named_after_its_batch() -> None:
    assert name_batch(3, 0) == "3 decodes"
    assert name_batch(0, 16) == "16 prompt tokens"
    assert name_batch(2, 14) == "2 decodes + 14 prompt tokens"
    assert name_batch(0, 0) == "empty"


def test_the_file_stops_growing_at_its_limit(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "trace.json", max_bytes=1000)
    for _ in range(100):
        with trace.phase("plan"):
            pass
    trace.close()
    assert trace.path.stat().st_size <= 1003
    assert json.loads(trace.path.read_text())


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="--step-trace-path"):
        StepTrace(tmp_path / "file" / "trace.json")


def tiny_engine(model: Path, **settings: Any) -> Engine:
    return Engine(
        model, load_format="dummy", skip_tokenizer_init=True, max_total_tokens=4096, cpu_threads=1, **settings
    )


@pytest.mark.slow
def test_an_engine_writes_a_trace_where_it_keeps_its_files(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path))
    with tiny_engine(tiny_model, enable_step_trace=True) as engine:
        engine.generate(input_ids=[[1, 2, 3], [4, 5]], sampling_params={"max_new_tokens": 6, "ignore_eos": True})
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name.startswith("steps-") and path.parent == default_trace_path(tmp_path).parent
    check_trace(json.loads(path.read_text()))


@pytest.mark.parametrize("end", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_a_killed_engine_leaves_what_it_wrote(tiny_model: Path, tmp_path: Path, end: signal.Signals) -> None:
    path = tmp_path / "trace.json"
    before = set(psutil.Process(os.getpid()).children())
    engine = tiny_engine(tiny_model, step_trace_path=path)
    try:
        engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 6, "ignore_eos": True})
        while len(lane(read_cut(path), DEVICE_LANE)) < 6:  # the last step is written after its token was sent
            time.sleep(0.01)
        children = set(psutil.Process(os.getpid()).children()) - before
        (scheduler,) = (p for p in children if "bough::scheduler" in " ".join(p.cmdline()))
        scheduler.send_signal(end)
        with pytest.raises(EngineDeadError):
            while True:
                engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 1})
    finally:
        engine.shutdown()
    events = read_cut(path)
    assert len(lane(events, DEVICE_LANE)) >= 6
