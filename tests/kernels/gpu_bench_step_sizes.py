"""Times the products of one layer for many numbers of rows (`PYTHONPATH=. python` this file).

What a token costs rises and falls with the number of tokens in a step, because products are cut into tiles and those
are spread over the device's processors in waves. `GPU_EVEN_TOKENS` follows what this prints. Sizes are taken in
turns, from captured graphs, by torch's algorithms.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import functools
import statistics

import torch

from tests.kernels.gpu_bench_tuned_linear import COPIES, LAYERS, ROUNDS, captured, multiply, some_weights

SIZES = range(256, 3073, 64)


def run() -> None:
    device = torch.device("cuda", 0)
    for model, shapes in LAYERS.items():
        weights = some_weights(shapes, device)
        inputs = {k: torch.randn(max(SIZES), k, device=device, dtype=torch.bfloat16) for _, k in shapes}
        replays = {rows: captured(functools.partial(multiply, weights, inputs, rows, tuned=False)) for rows in SIZES}
        times = [{rows: replay() for rows, replay in replays.items()} for _ in range(ROUNDS)]
        operations = 2e-6 * sum(n * k for n, k in shapes)
        for rows in SIZES:
            us = statistics.median(taken[rows] for taken in times) / COPIES
            print(f"{model} {rows}: {us:.1f} us, {1e3 * us / rows:.1f} ns a row, {operations * rows / us:.0f} TFLOP/s")


if __name__ == "__main__":
    run()
