"""Times the kernels of deterministic inference on a GPU at the shapes of two models, against those they stand in for.

    PYTHONPATH=. python tests/kernels/gpu_bench_deterministic.py [--only NAME]

Each time is that of one launch in a CUDA graph of twenty, in microseconds; products rotate over copies of the weight,
so that the cache does not serve it. `64x128x64 /4p` is a tile of 64 rows, 128 columns and 64 inputs, and four pieces
with programs of their own. Attention is shown by several chunks and tiles; the engine's is the one of `config_for`.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from gpu_check_deterministic import DEVICE, DTYPE, MODELS, Attention, Model, randn, warm_up
from gpu_timing import graph_us, table_row

from bough.kernels.decode_attention.triton import decode_attention
from bough.kernels.decode_attention.work import DecodeWork, plan_decode
from bough.kernels.invariant_linear.triton import config_for, invariant_linear
from bough.kernels.prefill_attention import triton as prefill_kernel
from bough.kernels.prefill_attention.triton import query_blocks

ROWS = (1, 16, 64, 256, 1024, 8192)
ROTATION_BYTES = 160 << 20  # well beyond the second-level cache
DECODES = ((1, 600), (1, 8192), (16, 1000), (256, 600), (64, 4000))  # rows, keys
PREFILLS = ((8, 1024), (1, 8192))
WIDTHS = (18, 6, 18, 9, 9, 7, 13)
ATTENTION_WIDTHS = (52, 9, 9, 7)


def time_product(name: str, n: int, k: int) -> None:
    bytes_of = n * k * 2
    weights = [randn(n, k) for _ in range(min(20, max(1, -(-ROTATION_BYTES // bytes_of))))]
    x = randn(max(ROWS), k)
    for m in ROWS:
        if n * m > 2**31:
            continue
        ours = graph_us(lambda i, m=m: invariant_linear(x[:m], weights[i % len(weights)]))
        theirs = graph_us(lambda i, m=m: F.linear(x[:m], weights[i % len(weights)]))
        config = config_for(m, n, k)
        tile, pieces = config.tile, -(-k // config.piece)
        cut = f"{tile.block_m}x{tile.block_n}x{tile.block_k} /{pieces}{'p' if config.parallel else ''}"
        speed = f"{bytes_of / ours / 1e6:.2f} TB/s" if m <= 64 else f"{2 * m * n * k / ours / 1e6:.0f} TFLOP/s"
        print(table_row((name, m, cut, f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}x", speed), WIDTHS))


def time_decodes(model: Model) -> None:
    for batch, length in DECODES:
        case = Attention(model, [length] * batch)
        parts = [(row, length - 1, length) for row in range(batch)]
        q, k, v, table, numbers, _, lengths = case.inputs(parts)
        work = DecodeWork(batch, model.heads, model.kv_heads, model.head_dim, DEVICE)
        plan_decode(lengths, work)
        fast = partial(decode_attention, q, k, v, table, numbers, lengths, work, page_size=1, scale=case.scale)
        theirs = graph_us(lambda _, fast=fast: fast())
        for chunk in (256, 512, 1024):
            ours = case.decode(parts, replace(case.config, chunk=chunk))
            show(f"{model.name} decode {batch} x {length}, chunk {chunk}", graph_us(lambda _, f=ours: f()), theirs)


def time_prefills(model: Model) -> None:
    for batch, length in PREFILLS:
        case = Attention(model, [length] * batch)
        parts = [(row, 0, length) for row in range(batch)]
        q, k, v, table, numbers, starts, _ = case.inputs(parts)
        config = prefill_kernel.config_for(model.heads, model.kv_heads, model.head_dim, DTYPE)
        blocks = query_blocks(np.full(batch, length, dtype=np.int32), config.block_queries)
        contexts = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        fresh = (k[: len(q)], v[: len(q)])
        options = {"page_size": 1, "scale": case.scale, "config": config}
        meta = (numbers, starts, contexts, torch.from_numpy(blocks).to(DEVICE))
        prefill = partial(prefill_kernel.prefill_attention, q, *fresh, k, v, table, *meta, **options)
        theirs = graph_us(lambda _, f=prefill: f())
        for chunk, block_m in ((512, 64), (1024, 64), (512, 128), (1024, 128)):
            variant = replace(case.config, chunk=chunk, block_m=block_m, num_warps=block_m // 16)
            ours = case.prefill(parts, variant)
            name = f"{model.name} prefill {batch} x {length}, chunk {chunk}, {block_m} lines"
            show(name, graph_us(lambda _, f=ours: f()), theirs)


def show(what: str, ours: float, theirs: float) -> None:
    print(table_row((what, f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.2f}x"), ATTENTION_WIDTHS), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parser.parse_args()
    models = [model for model in MODELS if options.only in model.name]
    warm_up()
    print(table_row(("product", "M", "tile /pieces", "ours us", "torch us", "speed", "rate"), WIDTHS))
    for model in models:
        for name, (n, k) in model.products().items():
            time_product(f"{model.name} {name}", n, k)
            torch.cuda.empty_cache()
    print(table_row(("attention", "ours us", "other us", "speed"), ATTENTION_WIDTHS))
    for model in models:
        time_decodes(model)
        time_prefills(model)


if __name__ == "__main__":
    main()
