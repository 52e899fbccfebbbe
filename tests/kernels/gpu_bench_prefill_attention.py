"""Times prefill attention on a GPU: `PYTHONPATH=. python tests/kernels/gpu_bench_prefill_attention.py`.

TFLOP/s counts two products of two operations for each pair of a query and a key that it sees (a causal square as half).
torch's own attention on one sequence of 4096 is the yardstick.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
import triton

from bough.kernels.prefill_attention.triton import PrefillConfig, config_for, prefill_attention, query_blocks
from tests.kernels.references import paged_attention as reference

HEAD_DIM, KV_HEADS, SCALE = 128, 8, 128**-0.5
CONFIGS = [  # block_m, block_n, warps, stages
    (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2),
    (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3),
]  # fmt: skip

POINTER_CONFIGS = [(64, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2)]


def shapes() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> new tokens and cached tokens of each row."""
    ragged = np.random.default_rng(0).integers(100, 1024, 64)
    ragged = ragged[: int(np.searchsorted(np.cumsum(ragged), 8192))]
    return {
        "4 x 4096": (np.full(4, 4096), np.zeros(4, int)),
        "ragged 100..1024": (ragged, np.zeros(len(ragged), int)),
        "512 x 64 over 1024": (np.full(512, 64), np.full(512, 1024)),
    }


def sdpa(heads: int) -> None:
    q = torch.randn((1, heads, 4096, HEAD_DIM), device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn_like(q) for _ in range(2))
    time = triton.testing.do_bench(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), return_mode="median", warmup=10, rep=50
    )
    print(f"  torch SDPA, 1 x 4096: {time * 1000:8.1f} us {2 * heads * 4096**2 * HEAD_DIM / time / 1e9:6.0f} TFLOP/s")


class Bench:
    """One shape's tensors."""

    def __init__(self, heads: int, query_lens: np.ndarray, context_lens: np.ndarray) -> None:
        self.heads, self.query_lens, self.context_lens = heads, query_lens.astype(np.int32), context_lens
        tokens, width, batch = int(query_lens.sum()), max(1, int(context_lens.max())), len(query_lens)
        half = {"device": "cuda", "dtype": torch.bfloat16}
        qkv = torch.randn((tokens, heads + 2 * KV_HEADS, HEAD_DIM), **half)
        self.q, self.k, self.v = qkv.split((heads, KV_HEADS, KV_HEADS), dim=1)
        self.k_cache, self.v_cache = (torch.randn((batch * width + 1, KV_HEADS, HEAD_DIM), **half) for _ in range(2))
        self.pages = torch.randperm(batch * width, device="cuda", dtype=torch.int32).view(batch, width) + 1
        self.rows = torch.arange(batch, device="cuda", dtype=torch.int32)
        self.starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
        pairs = (query_lens * context_lens + query_lens * query_lens / 2).sum()
        self.flops = 4.0 * float(pairs) * heads * HEAD_DIM
        self.out = torch.empty((tokens, heads, HEAD_DIM), **half)
        self.on_device = tuple(
            torch.tensor(a, dtype=torch.int32, device="cuda") for a in (self.starts, self.context_lens)
        )

    def time_us(self, config: PrefillConfig) -> float:
        blocks = torch.from_numpy(query_blocks(self.query_lens, config.block_queries, self.context_lens)).cuda()
        time: float = triton.testing.do_bench(
            lambda: prefill_attention(
                self.q, self.k, self.v, self.k_cache, self.v_cache, self.pages, self.rows, *self.on_device, blocks,
                page_size=1, scale=SCALE, out=self.out, config=config,
            ),
            return_mode="median", warmup=5, rep=30,
        )  # fmt: skip
        return time * 1000

    def error(self) -> float:
        """Of the first row, which the last timed call computed."""
        last = int(self.starts[1])
        k, v = (t[:last, :, :].double() for t in (self.k, self.v))
        starts, context = (t[:n] for t, n in zip(self.on_device, (2, 1), strict=True))
        expected = reference.prefill_attention(
            self.q[:last].double(), k, v, self.k_cache, self.v_cache, self.pages, self.rows[:1], starts, context, None,
            page_size=1, scale=SCALE,
        )  # fmt: skip
        return float((self.out[:last] - expected).norm() / expected.norm())


def bench(heads: int) -> None:
    print(f"\n{heads}/{KV_HEADS} heads, head_dim {HEAD_DIM}, page size 1, bf16")
    sdpa(heads)
    default = config_for(heads, KV_HEADS, HEAD_DIM, torch.bfloat16)
    group = heads // KV_HEADS
    variants = [PrefillConfig(m, n, group, w, s, True) for m, n, w, s in CONFIGS]
    variants += [PrefillConfig(m, n, group, w, s, False) for m, n, w, s in POINTER_CONFIGS]
    variants += [PrefillConfig(default.block_m, default.block_n, 1, default.num_warps, default.num_stages, True)]
    for name, (query_lens, context_lens) in shapes().items():
        case = Bench(heads, query_lens, context_lens)
        configs = (
            variants
            if heads == 16
            else [c for c in variants if c.block_m == 128 and c.num_warps == 8 and c.descriptors]
        )
        times = {config: case.time_us(config) for config in dict.fromkeys([*configs, default])}
        error = case.error()
        print(f"  {name}: error {error:.1e}{'' if error < 2e-2 else ' WRONG'}")
        best = min(times, key=lambda config: times[config])
        for c, time in times.items():
            mark = (" <- best" if c == best else "") + (" (default)" if c == default else "")
            print(
                f"    {c.block_m:3d} x {c.block_n:3d} pack {c.pack} warps {c.num_warps} stages {c.num_stages}"
                f" {'descriptors' if c.descriptors else 'pointers   '} {time:9.1f} us"
                f" {case.flops / time / 1e6:6.0f} TFLOP/s{mark}"
            )


if __name__ == "__main__":
    torch.manual_seed(0)
    for query_heads in (16, 32):
        bench(query_heads)
