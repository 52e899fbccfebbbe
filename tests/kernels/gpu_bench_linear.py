"""Times the skinny products on a GPU: every shape of two models, 1 to 16 rows, a few cuts, against torch.

    PYTHONPATH=. python tests/kernels/gpu_bench_linear.py [--all] [--only NAME] [--rows 1,16]

Each time is that of one launch in a CUDA graph of twenty over rotating copies of the weight, so that the cache does not
serve it. A line gives torch's time, that of the cut which `config_for` chooses, and the best cut (`*` where it is the
chosen one) with its rate of reading the weight and its speed relative to torch. `--all` prints every cut. Of a cut by
rows, k is the length of a piece. Fused products are measured up to two rows, and compared with what they replace: norm,
product and activation as launches of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
import triton
from gpu_timing import compile_all, distance, graph_us, table_row

from bough.kernels.activation.triton import gated_mul
from bough.kernels.rms_norm.triton import rms_norm
from bough.kernels.skinny_linear import triton as skinny
from bough.kernels.skinny_linear.triton import Tiling, config_for, fused_config_for

EPS = 1e-6
ROTATION_BYTES = 160 << 20  # well beyond the second-level cache
PIECE = 256  # inputs: 16 bytes for each thread of a warp
BY_ROWS = (  # elements of a program's rows, warps, whether in pieces, which leave each row to a warp; smallest first
    (2048, 1, True),
    (4096, 1, True),
    (4096, 2, False),
    (8192, 4, False),
    (8192, 4, True),
    (16384, 4, True),
    (16384, 8, True),
    (16384, 8, False),
    (32768, 8, False),
)
BY_TILES = (  # outputs, inputs, stages
    (32, 128, 5),
    (32, 256, 4),
    (64, 128, 5),
)
FUSED_ROWS = 2  # beyond, fused products are far slower than what they replace
WIDTHS = (18, 3, 7, 6, 9, 9, 30, 9, 6, 7)


@dataclass(frozen=True)
class Shape:
    name: str
    kind: str  # "linear", "norm" or "gate_up"
    n: int  # rows of the weight
    k: int

    def choice(self, m: int) -> Tiling:
        if self.kind == "linear":
            return config_for(m, self.n, self.k)
        return fused_config_for(m, self.k, gated=self.kind == "gate_up")


SHAPES = (
    Shape("qwen0.6b qkv", "linear", 4096, 1024),
    Shape("qwen0.6b norm+qkv", "norm", 4096, 1024),
    Shape("qwen0.6b o", "linear", 1024, 2048),
    Shape("qwen0.6b gate_up", "linear", 6144, 1024),
    Shape("qwen0.6b fused g_u", "gate_up", 6144, 1024),
    Shape("qwen0.6b down", "linear", 1024, 3072),
    Shape("qwen0.6b head", "linear", 151936, 1024),
    Shape("llama8b qkv", "linear", 6144, 4096),
    Shape("llama8b norm+qkv", "norm", 6144, 4096),
    Shape("llama8b o", "linear", 4096, 4096),
    Shape("llama8b gate_up", "linear", 28672, 4096),
    Shape("llama8b fused g_u", "gate_up", 28672, 4096),
    Shape("llama8b down", "linear", 4096, 14336),
    Shape("llama8b head", "linear", 128256, 4096),
)


class Bench:
    """One shape: rotating weights, rows for the largest batch, and the two ways to compute."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.weight_bytes = shape.n * shape.k * 2
        weight = torch.randn(shape.n, shape.k, dtype=torch.bfloat16, device="cuda") * shape.k**-0.5
        copies = min(20, max(1, -(-ROTATION_BYTES // self.weight_bytes)))
        self.weights = [weight] + [weight.clone() for _ in range(copies - 1)]
        self.x, self.residual = torch.randn(2, 16, shape.k, dtype=torch.bfloat16, device="cuda")
        self.norm_weight = torch.rand(shape.k, dtype=torch.bfloat16, device="cuda") + 0.5

    def ours(self, m: int, config: Tiling, number: int = 0) -> torch.Tensor:
        weight = self.weights[number % len(self.weights)]
        x, start = self.x[:m], (self.x[:m], self.residual[:m], self.norm_weight, EPS, False)
        if self.shape.kind == "norm":
            return skinny.skinny_norm_linear(*start, weight, config=config)[0]
        if self.shape.kind == "gate_up":
            return skinny.skinny_gate_up(*start, weight, "silu", config=config)[0]
        return skinny.skinny_linear(x, weight, config=config)

    def torchs(self, m: int, residual: torch.Tensor, number: int = 0) -> torch.Tensor:
        weight, x = self.weights[number % len(self.weights)], self.x[:m]
        if self.shape.kind != "linear":
            x, _ = rms_norm(x, self.norm_weight, EPS, residual)
        y = F.linear(x, weight)
        return gated_mul(y, "silu") if self.shape.kind == "gate_up" else y


def cuts(shape: Shape, m: int) -> list[Tiling]:
    """The chosen cut first, then others worth measuring."""
    others = list(cuts_by_rows(shape, BY_ROWS if m == 1 else BY_ROWS[:5])) if m <= 4 else []
    if shape.kind == "linear" and m > 1:
        others += cuts_by_tiles(shape)
    return list(dict.fromkeys([shape.choice(m), *others]))


def cuts_by_rows(shape: Shape, programs: tuple[tuple[int, int, bool], ...]) -> Iterator[Tiling]:
    """Pieces only where each warp has a row, and the largest programs in one piece only where rows are long."""
    width = triton.next_power_of_2(shape.k)
    for elements, warps, in_pieces in programs:
        block_n = elements // width
        if block_n >= (warps if in_pieces else 1) and block_n <= 16 and (in_pieces or width > 2048 or warps <= 4):
            yield Tiling(True, block_n, PIECE if in_pieces else width, num_warps=warps)


def cuts_by_tiles(shape: Shape) -> Iterator[Tiling]:
    """Few outputs in narrow tiles, their inputs split among as many programs as keep the device busy, or twice that."""
    for block_n, block_k, stages in BY_TILES:
        programs, split = -(-shape.n // block_n), 1
        if programs < 96 and block_n > 32:
            continue
        while programs * split < 96 and block_k * split * 4 <= shape.k:
            split *= 2
        yield Tiling(False, block_n, block_k, split, num_stages=stages)
        if programs * split <= 132 and block_n == 32 and block_k * split * 4 <= shape.k:
            yield Tiling(False, block_n, block_k, 2 * split, num_stages=stages)


def described(cut: Tiling) -> str:
    if cut.by_rows:
        return f"rows n{cut.block_n} k{cut.block_k} w{cut.num_warps}"
    return f"tiles n{cut.block_n} k{cut.block_k} /{cut.split_k} w{cut.num_warps} s{cut.num_stages}"


def measure(shape: Shape, rows: list[int], show_all: bool) -> None:
    bench = Bench(shape)
    wanted: list[tuple[int, Tiling]] = [(m, cut) for m in rows for cut in cuts(shape, m)]
    launches: list[Callable[[], object]] = [partial(bench.ours, m, cut) for m, cut in wanted]
    fitting = [pair for pair, fits in zip(wanted, compile_all(launches), strict=True) if fits]
    torch.cuda.synchronize()
    for m in rows:
        expected = bench.torchs(m, bench.residual[:m].clone())
        theirs = graph_us(partial(bench.torchs, m, bench.residual[:m].clone()))
        times: dict[Tiling, float] = {}
        for cut in (cut for rows_of, cut in fitting if rows_of == m):
            error = distance(bench.ours(m, cut), expected)
            if not error < 2e-2:
                print(f"WRONG by {error:.3g}: {shape.name} m={m} {described(cut)}")
                continue
            times[cut] = graph_us(partial(bench.ours, m, cut))
        chosen, best = shape.choice(m), min(times, key=times.__getitem__)
        for cut in sorted(times, key=times.__getitem__) if show_all else [best]:
            rate = bench.weight_bytes / times[cut] / 1e6
            ours = f"{times[chosen]:.2f}" if chosen in times else "none"
            label = described(cut) + (" *" if cut == chosen else "")
            cells = (f"{theirs:.2f}", ours, label, f"{times[cut]:.2f}", f"{rate:.2f}", f"{theirs / times[cut]:.2f}x")
            print(table_row((shape.name, m, shape.n, shape.k, *cells), WIDTHS), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="print every cut, fastest first")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--rows", default="1,2,4,16", help="numbers of rows, with commas between")
    options = parser.parse_args()
    print(table_row(("shape", "M", "N", "K", "torch us", "chosen us", "best cut", "us", "TB/s", "speed"), WIDTHS))
    for shape in SHAPES:
        if options.only in shape.name:
            rows = [int(m) for m in options.rows.split(",")]
            measure(shape, [m for m in rows if shape.kind == "linear" or m <= FUSED_ROWS], options.all)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
