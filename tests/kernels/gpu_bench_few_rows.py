"""Times whole decode steps of few rows on a GPU, with products by a library or by Triton's tiles.

`PYTHONPATH=. python tests/kernels/gpu_bench_few_rows.py llama-3.1-8b`: microseconds of a captured step of so many rows
with 400 keys each. By tiles, every kernel of a step can be set up while the one before it runs, and can fetch its first
weights meanwhile; so what they save shows only in their company.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from bough.executor.cuda_executor import CudaExecutor, DecodeGraph
from bough.kernels import triton_ops
from bough.kernels.rms_norm.triton import rms_norm
from bough.kernels.skinny_linear import triton as skinny
from bough.kernels.skinny_linear.tiling import MANY_OUTPUTS, WAVE, Tiling
from tests.kernels.gpu_bench_projected_decode import build, place, step_us

ROWS, KEYS = (2, 4, 8, 16, 32, 64, 128), 400
FEW_KEYS_ROWS = 16
GATED = {  # by rows: cuts of gate and up
    16: [Tiling(False, *cut) for cut in ((16, 128, 1, 4, 5), (32, 128, 1, 4, 4), (64, 64, 1, 4, 4))],
    64: [Tiling(False, *cut) for cut in ((32, 128, 1, 4, 3), (64, 64, 1, 4, 3))],
    128: [Tiling(False, 64, 64, num_stages=3)],
}


@dataclass(frozen=True)
class Variant:
    """A way to multiply: without tiles, as the engine does."""

    block_n: int = 0
    block_k: int = 0
    num_stages: int = 0
    ahead: bool = False
    gated: Tiling | None = None

    def __str__(self) -> str:
        if not self.block_n:
            return "as it is"
        text = f"{self.block_n} x {self.block_k}, {self.num_stages} stages{', ahead' if self.ahead else ''}"
        if self.gated is None:
            return text
        return f"{text}, gate of {self.gated.block_n} x {self.gated.block_k}, {self.gated.num_stages} stages"

    def cut(self, m: int, n: int, k: int, itemsize: int = 2) -> Tiling:
        """Few outputs have their inputs shared among as many programs as keep the device busy."""
        split, tiles = 1, -(-n // self.block_n)
        while n < MANY_OUTPUTS and tiles * split < WAVE and k // (2 * split) >= 2 * self.block_k:
            split *= 2
        return Tiling(False, self.block_n, self.block_k, split, num_stages=self.num_stages)


def variants(rows: int) -> Iterator[Variant]:
    yield Variant()
    sizes = [(32, 128, 5), (64, 128, 4), (64, 64, 5)] if rows <= 32 else [(64, 64, 4), (32, 64, 5), (128, 64, 3)]
    for size in sizes:
        yield Variant(*size)
        yield Variant(*size, ahead=True)
    for gated in next(cuts for most, cuts in GATED.items() if rows <= most):
        yield Variant(*sizes[0], ahead=True, gated=gated)


@contextlib.contextmanager
def multiplying(variant: Variant) -> Iterator[None]:
    if not variant.block_n:
        yield
        return

    def norm_gate_up(ops: Any, x: Any, residual: Any, norm: Any, weight: Any, bias: Any, activation: Any) -> Any:
        normed, stream = rms_norm(x, norm.weight, norm.eps, residual, norm.plus_one)
        return skinny.tiled_gate_up(normed, weight, activation, config=variant.gated, ahead=True), stream

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(triton_ops, "worth", lambda m, n, k: True))
        patches.enter_context(patch.object(skinny, "config_for", variant.cut))
        ahead = partial(skinny.skinny_linear, ahead=variant.ahead)
        patches.enter_context(patch.object(triton_ops, "skinny_linear", ahead))
        if variant.gated is not None:
            patches.enter_context(patch.object(triton_ops.TritonOps, "norm_gate_up", norm_gate_up))
        yield


@torch.inference_mode()
def capture(executor: CudaExecutor, rows: int, variant: Variant) -> DecodeGraph:
    with multiplying(variant):
        return executor._capture_decode(rows, few_keys=rows <= FEW_KEYS_ROWS)


def main(shape: str) -> None:
    executor = build(shape)
    for rows in ROWS:
        graphs = {variant: capture(executor, rows, variant) for variant in variants(rows)}
        place(executor, rows, KEYS)
        print(f"{rows} rows", flush=True)
        for variant, graph in graphs.items():
            print(f"  {variant}: {step_us(graph):.0f} us", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
