"""Times a decode step's attention and products on a GPU that is hot: `PYTHONPATH=. python` this file.

A device that computes for long runs into its power limit, and what one kernel draws the next one lacks. So besides
microseconds there are watts and the clock: of attention alone, and of attention with the four products of a layer of an
8B model, with parts of a row weighed so many at a time.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.nn.functional as F

from bough.kernels.decode_attention import triton as fast
from bough.kernels.decode_attention.work import DecodeWork, plan_decode
from tests.kernels.references import paged_attention as reference

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
PRODUCTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SHAPES = ((256, 900), (96, 1200), (40, 1300), (30, 1500), (20, 2000), (8, 16_000), (2, 30_000))  # rows, keys of each
AT_ONCE = (2, 4, 8)
CAPTURED, COPIES = 8, 4  # layers in a graph, and weights and caches: none is found in the cache from the time before
HEATING_S, MEASURING_S = 0.5, 2.0  # what the driver says of energy is a tenth of a second old


class Meter:
    """What the driver knows of the device's power."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._device = ctypes.c_void_p()
        self._library.nvmlInit_v2()
        self._library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(self._device))

    def joules(self) -> float:
        millijoules = ctypes.c_ulonglong()
        self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules))
        return millijoules.value / 1000

    def megahertz(self) -> int:
        clock = ctypes.c_uint()
        self._library.nvmlDeviceGetClockInfo(self._device, 1, ctypes.byref(clock))
        return clock.value


@dataclass(frozen=True)
class Hot:
    """One layer of a graph that ran again and again."""

    us: float
    watts: float
    megahertz: float

    def __str__(self) -> str:
        return f"{self.us:.1f} us ({self.watts:.0f} W, {self.megahertz:.0f} MHz)"


def measure(run: Callable[[int], object], meter: Meter) -> Hot:
    run(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(CAPTURED):
            run(layer)
    _repeat(graph, HEATING_S, meter)
    before, began = meter.joules(), time.monotonic()
    clocks = _repeat(graph, MEASURING_S, meter)
    lasted = time.monotonic() - began
    return Hot(
        1e6 * lasted / (len(clocks) * CAPTURED * CAPTURED),
        (meter.joules() - before) / lasted,
        statistics.median(clocks),
    )


def _repeat(graph: torch.cuda.CUDAGraph, seconds: float, meter: Meter) -> list[int]:
    """The clock at each of the times that the graph was replayed, a few times over."""
    clocks, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(CAPTURED):
            graph.replay()
        clocks.append(meter.megahertz())
        torch.cuda.synchronize()
    return clocks


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


class Layer:
    """Attention and products of so many rows."""

    def __init__(self, rows: int, keys: int, weights: list[list[torch.Tensor]]) -> None:
        self._weights = weights
        self._inputs = {k: draw(rows, k) for _, k in PRODUCTS}
        self._pools = [draw(2, rows * keys + 1, KV_HEADS, HEAD_DIM) for _ in range(COPIES)]
        self._q = draw(rows, HEADS, HEAD_DIM)
        self._pages = torch.randperm(rows * keys, device="cuda", dtype=torch.int32).view(rows, keys) + 1
        self._rows = torch.arange(rows, device="cuda", dtype=torch.int32)
        self._lengths = torch.full((rows,), keys, device="cuda", dtype=torch.int32)
        self._work = DecodeWork(rows, HEADS, KV_HEADS, HEAD_DIM, self._q.device)
        plan_decode(self._lengths, self._work)

    def parts(self) -> int:
        """Of the first row."""
        return int(self._work.items[0, 3])

    def attend(self, layer: int) -> torch.Tensor:
        k, v = self._pools[layer % COPIES]
        places = (self._pages, self._rows, self._lengths, self._work)
        return fast.decode_attention(self._q, k, v, *places, page_size=1, scale=HEAD_DIM**-0.5)

    def run(self, layer: int) -> None:
        self.attend(layer)
        for weight in self._weights[layer % COPIES]:
            F.linear(self._inputs[weight.shape[1]], weight)

    def error(self) -> float:
        first = slice(0, 2)
        k, v = self._pools[0]
        places = (self._pages, self._rows[first], self._lengths[first], None)
        expected = reference.decode_attention(self._q[first].double(), k, v, *places, page_size=1, scale=HEAD_DIM**-0.5)
        return float((self.attend(0)[first] - expected).norm() / expected.norm())


def main() -> None:
    meter = Meter()
    weights = [[draw(*shape) * 0.02 for shape in PRODUCTS] for _ in range(COPIES)]
    for rows, keys in SHAPES:
        layer = Layer(rows, keys, weights)
        print(f"{rows} rows of {keys} keys, in {layer.parts()} parts", flush=True)
        for parts in AT_ONCE if layer.parts() > 1 else AT_ONCE[:1]:
            with patch.object(fast, "WEIGHED_PARTS", parts):
                attention, whole = measure(layer.attend, meter), measure(layer.run, meter)
                print(f"  {parts} at a time: attention {attention}, layer {whole}, error {layer.error():.1e}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
