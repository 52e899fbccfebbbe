# mypy: disable-error-code="import-untyped, untyped-decorator, misc"
"""What `KernelMakers` promises, with Triton's real compiler and a device that only notes what is launched on it."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before any kernel is defined
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bough.executor.warm_up import KernelMakers
from bough.kernels.activation.triton import gated_mul
from bough.kernels.rms_norm.triton import rms_norm
from tests.kernels.compile_all import AbsentDevice

launched: list[str] = []
loaded: list[tuple[str, str]] = []  # kernels, and the threads that loaded them


def load(name: str) -> tuple[str, str, int, int, int]:
    """A module, a function, registers, spills, and how many threads a block may have."""
    loaded.append((name, threading.current_thread().name))
    return name, name, 0, 0, 1024


class NotingDevice(AbsentDevice):
    """Loads and launches kernels by writing down their names."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232_448},
        load_binary=lambda name, *rest: load(name),
    )

    @staticmethod
    def launcher_cls(source: Any, metadata: Any) -> Any:
        return lambda *args: launched.append(metadata.name)


@triton.jit
def _faulty(out: tl.tensor) -> None:
    tl.store(out, tl.no_such_function(1))


def walk_through() -> None:
    x, weight = torch.zeros(4, 64), torch.ones(64)
    for _ in range(3):  # layers
        rms_norm(x, weight, 1e-5)
        gated_mul(x, "silu")
        _faulty[(1,)](x)


driver.set_active(NotingDevice(GPUTarget("cuda", 90, 32)))
entered: list[str] = []
with KernelMakers(lambda: entered.append(threading.current_thread().name)) as makers:
    with makers.instead_of_launches():
        walk_through()
    assert not launched
    assert "leave_out" not in triton.JITFunction.run.__name__
    assert sorted(name for name, _ in loaded) == ["_gated_rows", "_rms_norm"], loaded
    assert {thread for _, thread in loaded} <= set(entered), "compiled by threads that have the device"

    with makers.instead_of_launches():  # of this thread alone
        rms_norm(torch.zeros(4, 64), torch.ones(64), 1e-5)
        beside = threading.Thread(target=rms_norm, args=(torch.zeros(4, 64), torch.ones(64), 1e-5))
        beside.start()
        beside.join()
    assert launched == ["_rms_norm"]

    loaded.clear()
    launched.clear()
    try:
        walk_through()
    except triton.CompilationError as error:
        assert "no_such_function" in str(error)
    else:
        raise AssertionError("a kernel that cannot be made must say so when it is launched")
    assert launched == ["_rms_norm", "_gated_rows"]
    assert not loaded, f"left for the first launch: {loaded}"
print("as promised")
