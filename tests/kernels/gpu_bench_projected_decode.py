"""Times whole decode steps on a GPU: heads turned and stored by a launch of their own, or with the attention.

`PYTHONPATH=. python tests/kernels/gpu_bench_projected_decode.py qwen3-0.6b`: for several numbers of rows and keys the
microseconds of a captured step, by each variant of the kernel. What kernels save shows only in their company: each is
set up while the one before it runs.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch

from bough.attention import triton_backend
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.executor.cuda_executor import CudaExecutor, DecodeGraph
from bough.kernels.decode_attention import triton as plain
from bough.kernels.decode_attention.triton import DecodeConfig
from bough.kernels.projected_decode import triton as projected
from bough.loader.locate import find_files
from tests.kernels.gpu_timing import replay_us

ROWS, KEYS = (1, 2, 4, 8, 16, 64, 128, 256), (400, 1000, 2000, 4000, 16_000)
MOST_TOKENS = 256_000
REPLAYS, COLD_REPLAYS = 30, 6


@dataclass(frozen=True)
class Variant:
    """A way to attend: without a configuration, in launches of their own."""

    parts: int  # of a row, weighed at a time, if registers hold as many
    config: DecodeConfig | None = None
    ahead: bool = False  # whether the first keys and values are fetched before the kernel's turn

    def __str__(self) -> str:
        if self.config is None:
            return f"apart, {self.parts} parts"
        when = "ahead" if self.ahead else "in turn"
        return f"{self.config.block_n} keys, {self.config.num_stages} stages, {when}, {self.parts} parts"


WIDE, NARROW, PIPED = DecodeConfig(128, 4, 1), DecodeConfig(64, 4, 1), DecodeConfig(64, 4, 3)
VARIANTS = [
    *(Variant(parts) for parts in (4, 8, 16)),
    *(Variant(parts, WIDE, ahead=True) for parts in (4, 8, 16)),
    Variant(8, NARROW, ahead=True),
    Variant(8, PIPED, ahead=True),
    Variant(8, PIPED),
    Variant(8, DecodeConfig(32, 4, 4)),
]


def build(shape: str) -> CudaExecutor:
    settings = Settings.from_flat(
        {"model_shape": shape, "context_length": max(KEYS) + 1, "max_total_tokens": MOST_TOKENS + 1}
    )
    executor = build_executor(find_files(settings.model), settings).executor
    assert isinstance(executor, CudaExecutor)
    for layer in (*executor._pool.keys, *executor._pool.values):
        layer.normal_()
    return executor


@torch.inference_mode()
def capture(executor: CudaExecutor, rows: int, variant: Variant) -> DecodeGraph:
    """A step of so many rows."""
    chosen = partial(projected.projected_decode, config=variant.config, ahead=variant.ahead)
    with patch.object(triton_backend, "projected_decode", chosen), patch.object(plain, "WEIGHED_PARTS", variant.parts):
        return executor._capture_decode(rows, few_keys=variant.config is not None)


@torch.inference_mode()
def place(executor: CudaExecutor, rows: int, keys: int) -> None:
    """Rows of so many keys in the persistent buffers, each on pages of its own."""
    inputs, device = executor._inputs, executor._inputs.page_table.device
    pages = torch.arange(1, 1 + rows * keys, dtype=torch.int32, device=device)
    inputs.page_table[:rows, :keys] = pages.view(rows, keys)
    inputs._decode.zero_()
    inputs._decode[0, :rows] = torch.arange(rows, device=device)
    inputs._decode[1, :rows] = keys


def step_us(graph: DecodeGraph) -> float:
    times = [replay_us(graph.forward.replay) for _ in range(REPLAYS)]
    return statistics.median(times[COLD_REPLAYS:])


def main(shape: str) -> None:
    executor = build(shape)
    for rows in ROWS:
        graphs = {variant: capture(executor, rows, variant) for variant in VARIANTS}
        for keys in KEYS:
            if rows * keys <= MOST_TOKENS:
                place(executor, rows, keys)
                times = {variant: step_us(graph) for variant, graph in graphs.items()}
                best = min(times, key=lambda variant: times[variant])
                print(f"{rows} rows of {keys} keys; best: {best}", flush=True)
                print("  " + "; ".join(f"{variant} {us:.0f}" for variant, us in times.items()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
