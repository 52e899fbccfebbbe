"""The profile of a step: what it reads out of a trace, and how it sorts what a thread is busy with."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from bough.bench import thread_sampler
from bough.bench.cpu_profile import StepCosts, as_text, classify, read_trace, step_costs
from bough.bench.thread_sampler import ThreadSampler
from bough.observability.step_trace import DEVICE_LANE, HOST_LANE, StepTrace


def make_trace(path: Path) -> str:
    """Two steps of two decodes, 10 ms apart, after one with a prompt; the loop's phases before each launch."""
    trace = StepTrace(path, clock=lambda: 0.0)
    for step, (name, plan_s) in enumerate([("9 prompt tokens", 0.009), ("2 decodes", 0.001), ("2 decodes", 0.003)]):
        begin = 0.010 * step
        trace.add("plan", HOST_LANE, begin, begin + plan_s, {})
        trace.add("launch", HOST_LANE, begin, begin + 0.0005, {"step": step})
        trace.add("wait", HOST_LANE, begin, begin + 0.008, {"step": step})
        trace.add(name, DEVICE_LANE, begin, begin + 0.008, {"step": step})
    return path.read_text()  # not closed: its end is missing


def test_costs_are_those_of_steps_in_which_all_decode(tmp_path: Path) -> None:
    events = read_trace(make_trace(tmp_path / "steps.json"))
    costs = step_costs(events, 2, {"detokenizer": 0.004}, steps=4)
    assert costs.period_s == pytest.approx(0.010) and costs.device_s == pytest.approx(0.008)
    assert costs.host_s == pytest.approx({"plan": 0.002, "launch": 0.0005})
    assert costs.process_s == {"detokenizer": 0.001}


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            ["/x/bough/kernels/sampling/reference.py", "/x/bough/sampling/sampler.py", "/x/bough/executor/t.py"],
            "sampling",
        ),
        (["/torch/nn.py", "/x/bough/layers/linear.py", "/x/bough/executor/t.py"], "forward pass"),
        (["/x/bough/executor/native_tapes.py", "/x/bough/executor/native_executor.py"], "forward pass"),
        (["/x/bough/native/tape.py", "/x/bough/executor/native_sampling.py", "/x/bough/executor/e.py"], "sampling"),
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
        while sum(sampler.counts.values()) < 5:
            time.sleep(0.001)
    ended.set()
    thread.join()
    assert sampler.shares() == {"threading.py": 1.0}


def test_the_report_adds_sampling_and_text() -> None:
    costs = StepCosts(0.010, 0.008, {"plan": 0.001}, {"detokenizer": 0.0002})
    text = as_text(costs, {"forward pass": 0.9, "sampling": 0.1}, 16)
    assert "sampling and detokenising together     1.000 ms    10.0%" in text
