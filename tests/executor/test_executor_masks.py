"""Masks on their way to the sampler: a step computes meanwhile, waits only to sample, and nobody else waits."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from bough.core.plan import BatchPlan, Limits, StepResult, TokenMasks
from bough.executor.plain_plans import decode_plan
from bough.executor.threaded import StepMasks, ThreadedExecutor


class Inner:
    """Notes how far each step has come; the first allowed token is what a masked row samples."""

    def __init__(self) -> None:
        self.forwarded = threading.Event()

    def limits(self) -> Limits:
        return Limits(4, 1, (8,), 16, 64, 8, "test")

    def run(self, plan: BatchPlan, masks: StepMasks) -> StepResult:
        self.forwarded.set()
        tokens = np.zeros((len(plan.rows), 1), dtype=np.int32)
        if plan.masked is not None:
            bits = np.unpackbits(masks().words.view(np.uint8), axis=1, bitorder="little")
            tokens[plan.masked, 0] = bits.argmax(axis=1)
        ones = np.ones(len(plan.rows), dtype=np.int32)
        return StepResult(plan.step, tokens, ones, ones == 0, {}, {})


def masked_plan(step: int) -> BatchPlan:
    from dataclasses import replace

    return replace(decode_plan(step, 2), masked=np.array([False, True]))


def test_a_masked_step_computes_first_and_waits_only_to_sample() -> None:
    inner = Inner()
    executor = ThreadedExecutor(inner)
    try:
        assert executor.launch(decode_plan(0, 2)).wait().tokens.tolist() == [[0], [0]]
        inner.forwarded.clear()
        step = executor.launch(masked_plan(1))
        assert inner.forwarded.wait(10) and not step.future.done()
        executor.supply_masks(1, TokenMasks(np.array([[1 << 5, 0]], dtype=np.int32)))
        assert step.wait().tokens.tolist() == [[0], [5]]
    finally:
        executor.close()


def test_an_executor_that_is_closed_leaves_no_step_waiting() -> None:
    executor = ThreadedExecutor(Inner())
    step = executor.launch(masked_plan(0))
    executor.close()
    with pytest.raises(BaseException):  # noqa: B017  (whatever a cancelled future raises)
        step.wait()


def test_masks_are_for_a_step_that_waits() -> None:
    executor = ThreadedExecutor(Inner())
    with pytest.raises(KeyError):
        executor.supply_masks(7, TokenMasks(np.zeros((1, 2), dtype=np.int32)))
    executor.close()
