"""Times what latent attention is made of on a GPU: `PYTHONPATH=. python tests/kernels/gpu_bench_latent_attention.py`.

For 16 heads (DeepSeek-V2-Lite, or one of eight ranks of V3) and 128 (all of V3). Each time is that of one launch in
a captured graph of many, over several pools in turn so that no launch finds its latents in the cache of the one before.
TB/s counts each row's latents once, TFLOP/s the products of the form that is computed.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources  # type: ignore[import-untyped]

from bough.kernels.decode_attention import triton as decode
from bough.kernels.decode_attention.work import DecodeWork, plan_decode
from bough.kernels.invariant_attention import triton as invariant
from bough.kernels.invariant_attention.triton import Partials, prefill_items
from bough.kernels.latent_attention import triton as latents
from bough.kernels.prefill_attention.triton import query_blocks
from tests.kernels.gpu_timing import graph_us

RANK, ROPE, NOPE, VALUE, SCALE = 512, 64, 128, 128, 192**-0.5
WIDTH = RANK + ROPE
POOLS = 4
HALF = {"device": "cuda", "dtype": torch.bfloat16}
BLOCKS, WARPS, STAGES, PROGRAMS = (16, 32, 64), (4, 8), (2, 3, 4), (132, 264, 528)


def bench_products(heads: int, tokens: int) -> None:
    weights = [torch.randn(heads, NOPE + VALUE, RANK, **HALF) for _ in range(POOLS)]
    q, found = torch.randn(tokens, heads, NOPE + ROPE, **HALF), torch.randn(tokens, heads, RANK, **HALF)
    line, cache = torch.randn(tokens, WIDTH, **HALF), torch.zeros(tokens, 1, WIDTH, **HALF)
    angles, places = torch.zeros(4096, ROPE // 2, device="cuda"), torch.arange(tokens, device="cuda")
    norm = torch.ones(RANK, **HALF)
    store = graph_us(lambda i: latents.latent_store_(q, line, norm, 1e-6, angles, angles, places, places, cache))
    to = graph_us(lambda i: latents.absorb(q, weights[i % POOLS], NOPE))
    back = graph_us(lambda i: latents.lift(found, weights[i % POOLS], NOPE))
    print(f"{tokens:5} tokens: store {store:6.1f} us, absorb {to:6.1f} us, lift {back:6.1f} us", flush=True)


def bench_decodes(heads: int, dtype: torch.dtype, batch: int, length: int) -> None:
    groups = decode.head_blocks(heads)
    lengths = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    table = torch.randperm(batch * length, device="cuda", dtype=torch.int32).view(batch, length) + 1
    pools = [torch.randn(batch * length + 1, 1, WIDTH, **HALF).to(dtype) for _ in range(POOLS)]
    q = torch.randn(batch, heads, WIDTH, **HALF)
    served = decode.latent_config_for(heads // groups, dtype)
    times = {}
    for block, warps, stages, programs in itertools.product(BLOCKS, WARPS, STAGES, PROGRAMS):
        config = decode.DecodeConfig(block, warps, stages)
        work = DecodeWork(batch, heads, groups, RANK, q.device, **{**decode.LATENT_WORK, "programs": programs})
        plan_decode(lengths, work)

        def attend(i: int, config: decode.DecodeConfig = config, work: DecodeWork = work) -> object:
            cache = pools[i % POOLS]
            places = (cache, cache[..., :RANK], table, rows, lengths, work)
            return decode.decode_attention(q, *places, page_size=1, scale=SCALE, config=config)

        try:
            times[config, programs] = graph_us(attend)
        except OutOfResources:
            continue
    moved = batch * length * WIDTH * dtype.itemsize
    best = min(times, key=lambda key: times[key])
    for name, key in (("served", (served, decode.LATENT_WORK["programs"])), ("best", best)):
        took = times[key]
        print(
            f"{batch:4} x {length:5} {dtype} {name}: {took:7.1f} us, {moved / took / 1e6:.2f} TB/s {key}",
            flush=True,
        )


def bench_prompts(heads: int, queries: int, context: int) -> None:
    weight = torch.randn(heads, NOPE + VALUE, RANK, **HALF)
    keys, lens = queries + context, np.array([queries], dtype=np.int32)
    read, q = torch.randn(keys, WIDTH, **HALF), torch.randn(queries, heads, NOPE + ROPE, **HALF)
    out = torch.empty(queries, heads, VALUE, **HALF)
    starts, contexts = (torch.tensor(n, dtype=torch.int32, device="cuda") for n in ([0, queries], [context]))

    def make() -> torch.Tensor:
        return F.linear(read[:, :RANK], weight.flatten(0, 1)).view(keys, heads, NOPE + VALUE)

    made, expand = make(), graph_us(lambda i: make())
    blocks = torch.from_numpy(query_blocks(lens, latents.config_for(torch.bfloat16).block_m)).cuda()
    places = (starts, starts[:1], contexts, blocks)
    attend = graph_us(lambda i: latents.expanded_attention(q, made, read[:, RANK:], *places, scale=SCALE, out=out))
    config = invariant.config_for(heads, 1, RANK, torch.bfloat16)
    items = torch.from_numpy(prefill_items(lens, lens * 0 + context, config.block_queries, 0)).cuda()
    nothing, rows = torch.empty(0, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    table = torch.arange(keys, dtype=torch.int32, device="cuda")[None]
    cache = read[:, None]

    def absorbed(i: int) -> object:
        found = invariant.invariant_attention(
            latents.absorb(q, weight, NOPE), cache, cache[..., :RANK], table, rows, starts, contexts + queries,
            items, programs=len(items) - 1, partials=Partials(nothing, nothing, nothing), split_rows=0, page_size=1,
            scale=SCALE, config=config,
        )  # fmt: skip
        return latents.lift(found, weight, NOPE, out=out)

    pairs = queries * context + queries * (queries + 1) // 2
    flops = 2 * pairs * heads * (NOPE + ROPE + VALUE)
    print(
        f"{queries:5} behind {context:5}: expand {expand:8.1f} us, attend {attend:8.1f} us "
        f"({flops / attend / 1e6:.0f} TFLOP/s); absorbed {graph_us(absorbed):8.1f} us",
        flush=True,
    )


if __name__ == "__main__":
    for heads in (16, 128):
        print(f"== {heads} heads")
        for tokens in (1, 16, 64, 256, 512):
            bench_products(heads, tokens)
        for queries, context in ((16, 2000), (128, 2000), (512, 0), (1024, 0), (2048, 0), (8192, 0), (2048, 8192)):
            bench_prompts(heads, queries, context)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            for batch, length in ((1, 600), (1, 32_768), (16, 1000), (64, 1000), (256, 800), (512, 1100)):
                bench_decodes(heads, dtype, batch, length)
