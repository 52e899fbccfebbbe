"""Finds the fastest cuts of the expert products on a GPU, for the tables in `bough/kernels/experts/triton.py`.

    PYTHONPATH=. python tests/kernels/gpu_tune_experts.py [--only qwen3-30b-a3b] [--tokens 1,16,256] [--all]
        [--weights fp8]

Each time is that of one launch in a CUDA graph of twenty, each with other choices of experts. A line gives the chosen
cut's time and the best cut of each product with its time, and what that is of the memory's or the tensor cores' rate.
Weights are bf16, or fp8 with a scale for each row, or fp8-blocks with one for every 128 inputs. Of fp8, cuts are tried
with rows of 16 bits and with rows of 8 (`small rows`), whose time has the quantising of the rows in it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from gpu_timing import compile_all, graph_us

from bough.core.model_config import MoEConfig
from bough.kernels.experts import triton as experts
from bough.kernels.experts.reference import Matrices
from bough.kernels.experts.triton import MAX_TOKENS_BY_ROWS, MAX_TOKENS_UNSORTED, Cut, RowCut, Tiling, config_for
from bough.kernels.quantize_rows.reference import GROUP, QuantizedRows
from bough.kernels.quantize_rows.triton import quantize_rows
from bough.kernels.routing.triton import Order, Routed, counters, put_in_order, route

T = TypeVar("T")
TOKENS = (1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
CHOICES = 8


@dataclass(frozen=True)
class Shape:
    name: str
    experts: int
    top: int
    inner: int
    hidden: int
    appended: int = 0  # shared experts behind them

    @property
    def pairs(self) -> int:
        return self.top + self.appended

    @property
    def matrices(self) -> int:
        return self.experts + self.appended


SHAPES = (
    Shape("qwen3-30b-a3b", 128, 8, 768, 2048),
    Shape("deepseek-v2-lite", 64, 6, 1408, 2048, 2),
    Shape("mixtral-8x7b", 8, 2, 14336, 4096),
)
SKINNY = [Cut(n, k, 4, s) for n, k, s in itertools.product((32, 64, 128), (64, 128, 256), (3, 5))]
SKINNY += [Cut(128, k, 8, 4) for k in (64, 128)]
WIDE = [Cut(n, 64, w, s) for n, w, s in itertools.product((64, 128, 256), (4, 8), (3, 4))]
WEIGHTS = ("bf16", "fp8", "fp8-blocks")


def rows_to_try(rows: float) -> list[tuple[int, bool]]:
    """Heights of tiles, and whether the weight is the left side."""
    if rows <= 8:
        return [(16, True), (16, False)]
    if rows <= 40:
        return [(16, True), (32, True), (64, True), (64, False)]
    if rows <= 160:
        return [(64, True), (64, False), (128, False)]
    return [(64, False), (128, False)]


def cuts_to_try(rows: float, weights: str) -> list[Cut]:
    """Tiles of 8 bits have as many bytes, and with blocks at most one."""
    if weights == "bf16":
        return SKINNY if rows <= 40 else WIDE
    cuts = SKINNY if rows <= 40 else [replace(cut, block_k=128) for cut in WIDE]
    return [cut for cut in cuts if cut.block_k <= GROUP or weights == "fp8"]


class Bench:
    def __init__(self, shape: Shape, tokens: int, weights: str) -> None:
        self.shape, self.tokens = shape, tokens
        self.fp8, self.group = weights != "bf16", GROUP if weights == "fp8-blocks" else 0
        moe = MoEConfig(shape.experts, shape.top, shape.inner, appended=shape.appended)
        kind = {"device": "cuda", "dtype": torch.bfloat16}
        self.x = torch.randn(tokens, shape.hidden, **kind)  # type: ignore[call-overload]
        self.gate_up = self.weights(2 * shape.inner, shape.hidden)
        self.down = self.weights(shape.hidden, shape.inner)
        self.between = torch.randn(tokens * shape.pairs, shape.inner, **kind)  # type: ignore[call-overload]
        self.results = torch.empty(tokens * shape.pairs, shape.hidden, **kind)  # type: ignore[call-overload]
        self.routed: list[Routed] = []
        self.orders: dict[int, list[Order | None]] = {}
        heights = {height for height, _ in rows_to_try(tokens * shape.pairs / shape.matrices)}
        self.chosen = config_for(tokens, shape.pairs, shape.matrices, self.fp8, grouped=self.group > 0)
        heights.add(self.chosen.block_m)
        for _ in range(CHOICES):
            logits = torch.randn(tokens, shape.experts, device="cuda")
            few = tokens <= MAX_TOKENS_UNSORTED
            routed = route(logits, moe, None, count=not few)
            self.routed.append(routed)
            for height in heights:
                order = None if few else put_in_order(routed, shape.matrices, height)
                self.orders.setdefault(height, []).append(order)
            counters(logits.device).zero_()
        self.used = sum(len(routed.ids.unique()) for routed in self.routed) / CHOICES

    def weights(self, outputs: int, inputs: int) -> Matrices:
        values = torch.randn(self.shape.matrices, outputs, inputs, device="cuda", dtype=torch.bfloat16)
        if not self.fp8:
            return values
        rows = quantize_rows(values.flatten(0, 1), self.group)
        return QuantizedRows(*(part.view(self.shape.matrices, outputs, -1) for part in rows))

    def rows(self, x: torch.Tensor, tiling: Tiling) -> Matrices:
        return quantize_rows(x, self.group) if tiling.small_rows else x

    def gate_up_launch(self, tiling: Tiling, number: int) -> None:
        routed, order = self.routed[number % CHOICES], self.orders[tiling.block_m][number % CHOICES]
        rows, out = self.rows(self.x, tiling), self.between
        experts.product_tiles(rows, self.gate_up, routed, order, out, tiling, tiling.gate_up, "silu")

    def down_launch(self, tiling: Tiling, number: int) -> None:
        routed, order = self.routed[number % CHOICES], self.orders[tiling.block_m][number % CHOICES]
        rows, out = self.rows(self.between, tiling), self.results
        experts.product_tiles(rows, self.down, routed, order, out, tiling, tiling.down)

    def gate_up_rows(self, cut: RowCut, number: int) -> None:
        experts.gate_up_rows(self.x, self.gate_up, self.routed[number % CHOICES], self.between, "silu", cut)

    def down_rows(self, cut: RowCut, number: int) -> None:
        out = self.results[: self.tokens]
        experts.down_rows(self.between, self.down, self.routed[number % CHOICES], out, cut)

    def rate(self, us: float, matrices: int) -> str:
        weights = matrices * self.shape.inner * self.shape.hidden
        read = self.used * weights * (1 if self.fp8 else 2) / us / 1e6
        computed = self.tokens * self.shape.pairs * weights * 2 / us / 1e6
        return f"{read:.2f} TB/s {computed:.0f} TFLOP/s"


def best(launch: Callable[[T, int], None], tilings: list[T], show: bool) -> tuple[float, T]:
    fits = compile_all([partial(launch, tiling, 0) for tiling in tilings])
    timed = []
    for tiling, fit in zip(tilings, fits, strict=True):
        if fit:
            timed.append((graph_us(partial(launch, tiling), replays=3), tiling))
            if show:
                print(f"    {timed[-1][0]:9.1f} us {tiling}")
    return min(timed, key=lambda pair: pair[0])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only")
    parser.add_argument("--tokens")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16")
    given = parser.parse_args()
    counts = [int(part) for part in given.tokens.split(",")] if given.tokens else TOKENS
    for shape in (s for s in SHAPES if given.only in (None, s.name)):
        for tokens in counts:
            bench, rows = Bench(shape, tokens, given.weights), tokens * shape.pairs / shape.matrices
            us = [graph_us(partial(launch, bench.chosen)) for launch in (bench.gate_up_launch, bench.down_launch)]
            print(f"{shape.name} {given.weights} {tokens} tokens: chosen {us[0]:.1f} + {us[1]:.1f} us", flush=True)
            if tokens <= MAX_TOKENS_BY_ROWS:
                row_cuts = [RowCut(n, warps) for n in (1, 2, 4, 8) for warps in (1, 2, 4, 8)]
                for matrices, name, by_rows in ((2, "gate_up", bench.gate_up_rows), (1, "down", bench.down_rows)):
                    time, row_cut = best(by_rows, row_cuts, given.all)
                    print(f"  {name:8} {time:9.1f} us {bench.rate(time, matrices)}  {row_cut}", flush=True)
            tried = [
                Tiling(m, swap, described, cut, cut, small)
                for (m, swap) in rows_to_try(rows)
                for cut in cuts_to_try(rows, given.weights)
                for described in (False, True)
                for small in ((False, True) if bench.fp8 else (False,))
                if cut.block_n >= (64 if swap else 0)
            ]
            for matrices, name, launch in ((2, "gate_up", bench.gate_up_launch), (1, "down", bench.down_launch)):
                kept = [t for t in tried if name == "down" or t.block_m * t.gate_up.block_n <= 128 * 128]
                time, tiling = best(launch, kept, given.all)
                small = " small rows" if tiling.small_rows else ""
                cut = f"{tiling.block_m} {tiling.swap} {tiling.described} {tiling.down}{small}"
                print(f"  {name:8} {time:9.1f} us {bench.rate(time, matrices)}  {cut}", flush=True)


if __name__ == "__main__":
    main()
