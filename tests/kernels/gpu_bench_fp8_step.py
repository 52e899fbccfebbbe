"""Times what a decode step of an 8B model with fp8 weights and cache consists of, in the cuts that could be taken:

    PYTHONPATH=. python tests/kernels/gpu_bench_fp8_step.py [--rows 256,128,64,32]

Attention by its tiles; each product by torch, by torch with one scale for all (the rows' own would then be given
back by the next kernel), and by Triton's tiles; quantising launches by their warps. Each is a launch in a CUDA graph of
twenty. The first of each kind is what is taken now.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import itertools

import torch
import triton
from gpu_timing import compile_all, graph_us

from bough.kernels.decode_attention.triton import DecodeConfig, config_for, decode_attention
from bough.kernels.decode_attention.work import DecodeWork, plan_decode
from bough.kernels.quantize_rows import triton as quantise
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.kernels.scaled_linear.device import scaled_by_tiles
from bough.kernels.scaled_linear.triton import LINES, Cut, _side, scaled_linear

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
TILES = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8))
CUTS = [Cut(*tile, stages) for tile, stages in itertools.product(TILES, (4, 6))]
DECODES = [
    DecodeConfig(keys, warps, stages)
    for keys, warps, stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5, 6))
    if keys * stages <= 384
]
DEVICE, BEST = torch.device("cuda"), 4


def best(title: str, launches: dict[object, object]) -> None:
    """The present one, then the quickest others."""
    names = [name for name, fits in zip(launches, compile_all(launches.values()), strict=True) if fits]
    times = {name: graph_us(lambda i, name=name: launches[name](i)) for name in names}
    now, *others = times
    others.sort(key=times.__getitem__)
    lines = (f"{times[name]:.1f} {name}" for name in others[:BEST])
    print(f"{title}: now {times[now]:.1f} us ({now})", *lines, sep="\n    ", flush=True)


def attention(rows: int, keys: int) -> None:
    caches = torch.randn(2, rows * keys, 8, 128, device=DEVICE, dtype=torch.bfloat16).to(torch.float8_e4m3fn)
    table = torch.randperm(rows * keys, device=DEVICE).int().view(rows, keys)
    lengths = torch.full((rows,), keys, device=DEVICE, dtype=torch.int32)
    q, places = torch.randn(rows, 32, 128, device=DEVICE, dtype=torch.bfloat16), torch.arange(rows, device=DEVICE).int()
    work = DecodeWork(rows, 32, 8, 128, DEVICE)
    plan_decode(lengths, work)
    now = config_for(128, 4, caches.dtype)

    def launch(cut: DecodeConfig):
        return lambda i=0: decode_attention(
            q, *caches, table, places, lengths, work, page_size=1, scale=128**-0.5, config=cut
        )

    exact = launch(now)().float()
    best(f"attention of {rows} rows over {keys} keys", {cut: launch(cut) for cut in dict.fromkeys([now, *DECODES])})
    for cut in (DecodeConfig(64, 4, 4), DecodeConfig(64, 8, 4)):
        assert (launch(cut)().float() - exact).abs().max() < 0.02


def product(rows: int, name: str) -> None:
    n, k = SHAPES[name]
    copies = [torch.randn(n, k, device=DEVICE).to(torch.float8_e4m3fn) for _ in range((160 << 20) // (n * k) + 1)]
    scales, x_scales = torch.rand(n, 1, device=DEVICE), torch.rand(rows, 1, device=DEVICE)
    x, one = torch.randn(rows, k, device=DEVICE).to(torch.float8_e4m3fn), torch.ones((), device=DEVICE)
    weights, given = [QuantizedRows(w, scales) for w in copies], QuantizedRows(x, x_scales)

    def by_tiles(cut: Cut):
        def launch(i: int = 0) -> torch.Tensor:
            out = torch.empty((rows, n), dtype=torch.bfloat16, device=DEVICE)
            sides = [_side(x, cut.block_m, True), _side(copies[i % len(copies)], cut.block_n, True)]
            scaled_by_tiles[(triton.cdiv(rows, cut.block_m) * triton.cdiv(n, cut.block_n),)](
                sides[0], x_scales, sides[1], scales, None, out, rows, n, K=k, GROUPS=1, BLOCK_M=cut.block_m,
                BLOCK_N=cut.block_n, BLOCK_K=128, LINES=LINES, DESCRIBED=True, num_warps=cut.num_warps,
                num_stages=cut.num_stages,
            )  # fmt: skip
            return out

        return launch

    def now(i: int = 0) -> torch.Tensor:
        return scaled_linear(given, weights[i % len(weights)], None, torch.bfloat16)

    def by_torch(i: int = 0) -> torch.Tensor:
        w, of = copies[i % len(copies)].t(), {"scale_a": x_scales, "scale_b": scales.t()}
        return torch._scaled_mm(x, w, **of, out_dtype=torch.bfloat16, use_fast_accum=True)

    def one_scale(i: int = 0) -> torch.Tensor:
        w = copies[i % len(copies)].t()
        return torch._scaled_mm(x, w, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    title = f"{rows} rows, {name} (memory {n * k / 4.3e6:.1f} us)"
    best(title, {"now": now, "torch": by_torch, "torch, one scale": one_scale} | {cut: by_tiles(cut) for cut in CUTS})


def quantising(rows: int) -> None:
    x, residual = torch.randn(2, rows, 4096, device=DEVICE, dtype=torch.bfloat16)
    gain = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    wide = torch.randn(rows, 28672, device=DEVICE, dtype=torch.bfloat16)
    kinds = {
        "rows": lambda i=0: quantise.quantize_rows(x),
        "norm": lambda i=0: quantise.norm_quantize_rows(x, gain, 1e-5, residual),
        "gate": lambda i=0: quantise.gated_quantize_rows(wide, "silu"),
    }
    chosen = quantise.config_for
    for name, launch in kinds.items():
        times = {}
        for warps in (None, 4, 8, 16, 32):
            quantise.config_for = chosen if warps is None else lambda size, warps=warps: warps
            times[warps or "now"] = round(graph_us(launch), 2)
        quantise.config_for = chosen
        print(f"{rows} rows, quantising {name}: us by warps {times}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default="256,128,64,32")
    args = parser.parse_args()
    with torch.inference_mode():
        for rows in map(int, args.rows.split(",")):
            attention(rows, 930)
            quantising(rows)
            for name in SHAPES:
                product(rows, name)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
