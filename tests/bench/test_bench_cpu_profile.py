"""The profile of a step: what it reads out of a trace, how it sorts what a thread is busy with, and what it prints."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from bough.observability.step_trace import DEVICE_LANE, HOST_LANE, StepTrace
from tests.bench import thread_sampler
from tests.bench.cpu_executor_profile import SAMPLING, classify
from tests.bench.cpu_profile import Profile, as_text
from tests.bench.cpu_step_costs import Cost, EngineCosts, engine_costs, read_trace
from tests.bench.thread_sampler import ThreadSampler


def make_trace(path: Path) -> str:
    """Two steps of two decodes, 10 ms apart, after one with a prompt; the loop's phases before each launch. Of every
    phase half is CPU time."""
    trace = StepTrace(path, clock=lambda: 0.0)

    def phase(name: str, begin: float, lasted: float, details: dict[str, int]) -> None:
        trace.add(name, HOST_LANE, begin, begin + lasted, details, lasted / 2)

    for step, (name, plan_s) in enumerate([("9 prompt tokens", 0.009), ("2 decodes", 0.001), ("2 decodes", 0.003)]):
        begin = 0.010 * step
        phase("plan", begin, plan_s, {})
        phase("launch", begin, 0.0005, {"step": step})
        phase("wait", begin, 0.008, {"step": step})
        phase("masks", begin, 0.002, {"step": step})
        trace.add(name, DEVICE_LANE, begin, begin + 0.008, {"step": step})
    return path.read_text()  # not closed: its end is missing


def test_costs_are_those_of_steps_in_which_all_decode(tmp_path: Path) -> None:
    events = read_trace(make_trace(tmp_path / "steps.json"))
    costs = engine_costs(events, 2, {"detokenizer": 0.004}, steps=4)
    assert costs.period_s == pytest.approx(0.010) and costs.device_s == pytest.approx(0.008)
    assert {name: cost.wall_s for name, cost in costs.host.items()} == pytest.approx(
        {"plan": 0.002, "launch": 0.0005, "masks": 0.002}
    )
    assert all(cost.cpu_s == pytest.approx(cost.wall_s / 2) for cost in costs.host.values())
    assert costs.process_s == {"detokenizer": 0.001}


def test_phases_tell_their_cpu_time(tmp_path: Path) -> None:
    trace = StepTrace(tmp_path / "steps.json")
    with trace.phase("wait", 3):
        time.sleep(0.02)
    (event,) = (e for e in read_trace((tmp_path / "steps.json").read_text()) if e["name"] == "wait")
    assert 0 <= event["tdur"] < event["dur"]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            ["/x/bough/kernels/sampling/reference.py", "/x/bough/sampling/sampler.py", "/x/bough/executor/t.py"],
            SAMPLING,
        ),
        (["/torch/nn.py", "/x/bough/layers/linear.py", "/x/bough/executor/t.py"], "forward pass"),
        (["/x/bough/executor/native_tapes.py", "/x/bough/executor/native_executor.py"], "forward pass"),
        (["/x/bough/native/tape.py", "/x/bough/executor/native_sampling.py", "/x/bough/executor/e.py"], SAMPLING),
        (
            ["/x/bough/kernels/token_mask/reference.py", "/x/bough/sampling/masks.py", "/x/bough/executor/e.py"],
            SAMPLING,
        ),
        (["/lib/python/threading.py", "/x/bough/sampling/masks.py", "/x/bough/executor/e.py"], "waiting for masks"),
        (["/x/bough/executor/layout.py", "/x/bough/executor/threaded.py"], "rows, layout, results"),
        (["/lib/python/concurrent/futures/thread.py", "/lib/python/threading.py"], None),
        ([], None),
    ],
)
def test_a_stack_tells_what_the_thread_is_busy_with(files: list[str], found: str | None) -> None:
    assert classify(files) == found


def test_the_sampler_sees_the_thread_it_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_sampler, "INTERVAL_S", 0.0001)
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert thread.ident is not None
    with ThreadSampler(thread.ident, lambda files: Path(files[-1]).name) as sampler:
        while sampler.spent["threading.py"].looks < 5:
            time.sleep(0.001)
    ended.set()
    thread.join()
    (spent,) = sampler.spent.values()
    assert 0 <= spent.cpu_s < spent.wall_s, "it has only waited"


def test_the_report_adds_sampling_masks_and_text() -> None:
    engine = EngineCosts(
        0.010, 0.008, {"plan": Cost(0.001, 0.0005), "masks": Cost(0.003, 0.0003)}, {"detokenizer": 0.0002}
    )
    executor = {"forward pass": Cost(0.015, 0.0036), SAMPLING: Cost(0.001, 0.0004)}
    text = as_text(Profile("a step", engine, executor)).splitlines()
    assert f"{SAMPLING} + filling masks + detokenising" in text[-1] and "0.900 ms   22.5%" in text[-1]
    (forward,) = (line for line in text if "forward pass" in line)
    assert forward.split() == ["forward", "pass", "7.500", "ms", "75.0%", "3.600", "ms", "90.0%"]
