"""Times decode attention on a GPU: `PYTHONPATH=. python tests/kernels/gpu_bench_decode_attention.py`.

Each time is that of one layer in a captured graph of many (attention and combination; the plan is timed apart), over
several pools in turn so that no layer finds its keys in the cache of the one before. TB/s counts each row's keys and
values once, so rows that share a prefix can exceed the memory's speed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bough.kernels.decode_attention.triton import DecodeConfig, config_for, decode_attention
from bough.kernels.decode_attention.work import DecodeWork, plan_decode
from tests.kernels.references import paged_attention as reference

HEAD_DIM, KV_HEADS, SCALE = 128, 8, 128**-0.5
LAYERS = 4
CONFIGS = [(32, 4, 3), (32, 4, 5), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2), (128, 8, 3)]
PROGRAMS = [264, 528, 1056]
Paged = tuple[torch.Tensor, torch.Tensor]  # page table, lengths


def spread(lengths: torch.Tensor, page_size: int, shared: int = 0, group: int = 1) -> tuple[Paged, int]:
    """Random pages for rows of these lengths; the first `shared` tokens are common to each `group` of rows."""
    batch, width = len(lengths), -(-int(lengths.max()) // page_size)
    pages = torch.randperm(batch * width, device="cuda", dtype=torch.int32).view(batch, width) + 1
    if shared:
        common = shared // page_size
        pages[:, :common] = pages[::group, :common].repeat_interleave(group, dim=0)
    return (pages, lengths), (batch * width + 1) * page_size


def shapes(page_size: int) -> dict[str, tuple[Paged, int]]:
    def even(batch: int, length: int) -> torch.Tensor:
        return torch.full((batch,), length, dtype=torch.int32, device="cuda")

    def between(batch: int, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (batch,), dtype=torch.int32, device="cuda")

    return {
        "1 x 600": spread(even(1, 600), page_size),
        "1 x 32768": spread(even(1, 32768), page_size),
        "16 x 1000": spread(even(16, 1000), page_size),
        "64 x 1000": spread(even(64, 1000), page_size),
        "256 x 100..1500": spread(between(256, 100, 1500), page_size),
        "256 x 100..2048": spread(between(256, 100, 2048), page_size),
        "512 x 1100, shared": spread(even(512, 1100), page_size, 1024, 64),
    }


def graph_us(call: Callable[[int], object], layers: int = 16) -> float:
    """Median time of one call, when `layers` of them are captured and replayed together."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in range(layers):
            call(layer)
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / layers)
    return sorted(times[2:])[5]


class Bench:
    """One shape's tensors."""

    def __init__(self, heads: int, page_size: int, paged: Paged, slots: int) -> None:
        self.heads, self.page_size = heads, page_size
        self.pages, self.lengths = paged
        self.batch = len(self.lengths)
        half = {"device": "cuda", "dtype": torch.bfloat16}
        self.pools = [torch.randn((2, slots, KV_HEADS, HEAD_DIM), **half) for _ in range(LAYERS)]
        self.q = torch.randn((self.batch, heads + 2 * KV_HEADS, HEAD_DIM), **half)[:, :heads]
        self.out = torch.empty((self.batch, heads, HEAD_DIM), **half)
        self.rows = torch.arange(self.batch, device="cuda", dtype=torch.int32)
        self.bytes = int(self.lengths.sum()) * KV_HEADS * HEAD_DIM * 4

    def work(self, programs: int) -> DecodeWork:
        return DecodeWork(self.batch, self.heads, KV_HEADS, HEAD_DIM, self.q.device, programs=programs)

    def time_us(self, config: DecodeConfig, programs: int) -> float:
        work = self.work(programs)
        plan_decode(self.lengths, work)

        def attend(layer: int) -> None:
            k, v = self.pools[layer % LAYERS]
            decode_attention(
                self.q, k, v, self.pages, self.rows, self.lengths, work,
                page_size=self.page_size, scale=SCALE, out=self.out, config=config,
            )  # fmt: skip

        return graph_us(attend)

    def plan_us(self) -> float:
        work = self.work(PROGRAMS[1])
        return graph_us(lambda _: plan_decode(self.lengths, work))

    def error(self) -> float:
        """Of the first rows of what the last timed call left, which was the last pool's."""
        few = slice(0, 4)
        k, v = self.pools[-1]
        expected = reference.decode_attention(
            self.q[few].double(), k, v, self.pages, self.rows[few], self.lengths[few], None,
            page_size=self.page_size, scale=SCALE,
        )  # fmt: skip
        return float((self.out[few] - expected).norm() / expected.norm())


def bench(heads: int, page_size: int) -> None:
    print(f"\n{heads}/{KV_HEADS} heads, head_dim {HEAD_DIM}, page size {page_size}, bf16")
    default = (config_for(HEAD_DIM, heads // KV_HEADS, torch.bfloat16), PROGRAMS[1])
    sweep = [default]
    if page_size == 1:
        sweep += [(DecodeConfig(*c), PROGRAMS[1]) for c in CONFIGS] + [(default[0], n) for n in PROGRAMS]
    for name, (paged, slots) in shapes(page_size).items():
        case = Bench(heads, page_size, paged, slots)
        times = {choice: case.time_us(*choice) for choice in dict.fromkeys(sweep)}
        error = case.error()
        print(f"  {name:20s} error {error:.1e}{'' if error < 2e-2 else ' WRONG'}, plan {case.plan_us():.1f} us")
        best = min(times, key=lambda choice: times[choice])
        for (config, programs), time in times.items():
            mark = " <- best" if (config, programs) == best else ""
            mark += " (default)" if (config, programs) == default else ""
            print(
                f"    block {config.block_n:3d} warps {config.num_warps} stages {config.num_stages}"
                f" programs {programs:4d} {time:8.1f} us {case.bytes / time / 1e6:6.2f} TB/s{mark}"
            )


if __name__ == "__main__":
    torch.manual_seed(0)
    for page in (1, 16):
        for query_heads in (16, 32):
            bench(query_heads, page)
