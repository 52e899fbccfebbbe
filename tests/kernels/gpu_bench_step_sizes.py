"""Times the products of one layer for many numbers of rows (`PYTHONPATH=. python` this file).

What a token costs rises and falls with the number of tokens in a step, because products are cut into tiles and those
are spread over the device's processors in waves. `GPU_EVEN_TOKENS` follows what this prints. Sizes are taken in
turns, from captured graphs.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

LAYERS = {
    "llama-3.1-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "qwen3-0.6b": [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)],
}
SIZES = range(256, 3073, 64)
COPIES, ROUNDS = 6, 9

Weights = list[torch.Tensor]


def run() -> None:
    device = torch.device("cuda", 0)
    for model, shapes in LAYERS.items():
        weights = some_weights(shapes, device)
        inputs = {k: torch.randn(max(SIZES), k, device=device, dtype=torch.bfloat16) for _, k in shapes}
        replays = {rows: captured(functools.partial(multiply, weights, inputs, rows)) for rows in SIZES}
        times = [{rows: replay() for rows, replay in replays.items()} for _ in range(ROUNDS)]
        operations = 2e-6 * sum(n * k for n, k in shapes)
        for rows in SIZES:
            us = statistics.median(taken[rows] for taken in times) / COPIES
            print(f"{model} {rows}: {us:.1f} us, {1e3 * us / rows:.1f} ns a row, {operations * rows / us:.0f} TFLOP/s")


def some_weights(shapes: list[tuple[int, int]], device: torch.device) -> Weights:
    """Of several layers, so that none is found in the device's cache."""
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02 for _ in range(COPIES) for shape in shapes]


def multiply(weights: Weights, inputs: dict[int, torch.Tensor], rows: int) -> None:
    """The products of these layers."""
    for weight in weights:
        F.linear(inputs[weight.shape[1]][:rows], weight)


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
