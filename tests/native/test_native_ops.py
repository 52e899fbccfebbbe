"""The operations of a row: what is no number, and other machines' vectors under an emulator; tapes have the rest."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from bough.executor.native_recorder import ACTIVATIONS
from bough.kernels.quant_linear.packed import aligned_bytes
from bough.native.tape import Step, Tape, ThreadPool
from tests.native.drivers import RunDriver


@pytest.mark.parametrize(
    ("activation", "gated"), [(0, True), (1, True), *((number, False) for number in ACTIVATIONS.values())]
)
@pytest.mark.parametrize("place", [0, 9, 50])
def test_nan_passes_through_activations_and_caps(
    any_tier: ctypes.CDLL, activation: int, gated: bool, place: int
) -> None:
    size = 51
    x, out = np.ones((2, size), dtype=np.float32), np.zeros(size, dtype=np.float32)
    x[0, place] = np.nan
    tape, pool = Tape(any_tier), ThreadPool(any_tier, 1)
    tape.add("activate", x.ctypes.data, activation, gated, size, out.ctypes.data)
    tape.add("softcap", x.ctypes.data, size, 30.0)
    pool.run(tape, Step(tokens=1), aligned_bytes(tape.scratch_bytes(1, 1)).ctypes.data)
    for found in (out, x[0]):
        assert np.flatnonzero(np.isnan(found)).tolist() == [place]


@pytest.mark.parametrize(("name", "form"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_gelu_is_that_of_torch(any_tier: ctypes.CDLL, name: str, form: str) -> None:
    x = np.concatenate([np.linspace(-12.0, 12.0, 40_001), [-80.0, 80.0, 0.0]]).astype(np.float32)
    out = np.zeros_like(x)
    tape, pool = Tape(any_tier), ThreadPool(any_tier, 1)
    tape.add("activate", x.ctypes.data, ACTIVATIONS[name], False, x.size, out.ctypes.data)
    pool.run(tape, Step(tokens=1), aligned_bytes(tape.scratch_bytes(1, 1)).ctypes.data)
    expected = torch.nn.functional.gelu(torch.from_numpy(x).double(), approximate=form).numpy()
    assert (np.abs(out - expected) <= 4e-7 * np.maximum(1.0, np.abs(x))).all()


@pytest.mark.slow
def test_another_machine_s_operations_under_an_emulator(run_emulated: RunDriver) -> None:
    assert run_emulated("ops_driver.c", ["ops*.c", "cpu.c"]) == ""
