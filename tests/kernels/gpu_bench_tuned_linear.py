"""Times products by measured algorithms beside torch's (`PYTHONPATH=. python` this file).

For the layers of two models, the time of a layer's four products with torch's algorithms and with those that `Products`
finds, taken in turns, from captured graphs.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from bough.kernels.tuned_linear.products import products_on

LAYERS = {
    "llama-3.1-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "qwen3-0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
}
MEASURED = 8192
EVEN = [1024, 1536, 2048, 2560]
SIZES = [*EVEN, 6600, 7000, 7500, 8000, 8192, 8300, 8704]
COPIES, ROUNDS = 6, 9

Weights = list[torch.Tensor]


def run() -> None:
    device = torch.device("cuda", 0)
    products = products_on(device)
    for model, shapes in LAYERS.items():
        weights = some_weights(shapes, device)
        inputs = {k: torch.randn(max(SIZES), k, device=device, dtype=torch.bfloat16) for _, k in shapes}
        began = time.monotonic()
        products.prepare(MEASURED, EVEN, functools.partial(multiply, weights, inputs, 32, tuned=True))
        while products.tune():
            pass
        print(f"{model}: measured in {1e3 * (time.monotonic() - began):.0f} ms")
        for rows in SIZES:
            replays = [captured(functools.partial(multiply, weights, inputs, rows, tuned=t)) for t in (False, True)]
            times = [[replay() for replay in replays] for _ in range(ROUNDS)]
            plain, best = (statistics.median(column) / COPIES for column in zip(*times, strict=True))
            print(f"{model} {rows}: torch {plain:.1f} us, measured {best:.1f} us, {plain / best:.3f}", flush=True)


def some_weights(shapes: list[tuple[int, int]], device: torch.device) -> Weights:
    """Of several layers, so that none is found in the device's cache."""
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02 for _ in range(COPIES) for shape in shapes]


def multiply(weights: Weights, inputs: dict[int, torch.Tensor], rows: int, *, tuned: bool) -> None:
    """The products of these layers, by measured algorithms or by torch's."""
    for weight in weights:
        x = inputs[weight.shape[1]][:rows]
        algorithm = products_on(x.device).find(x, weight) if tuned else None
        if algorithm is None:
            F.linear(x, weight)
        else:
            products_on(x.device).multiply(algorithm, x, weight)


def captured(work: Callable[[], None]) -> Callable[[], float]:
    """A graph of this work: each call replays it and says how many microseconds it took."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> float:
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        done.record()
        done.synchronize()
        return float(begun.elapsed_time(done)) * 1e3

    replay()
    return replay


if __name__ == "__main__":
    run()
