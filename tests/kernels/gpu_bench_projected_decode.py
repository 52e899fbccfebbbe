"""Times whole decode steps on a GPU: heads turned and stored by a launch of their own, or with the attention.

`PYTHONPATH=. python tests/kernels/gpu_bench_projected_decode.py qwen3-0.6b`: for several numbers of rows and keys the
microseconds of a captured step, by each configuration of the kernel and each way to weigh a row's parts. What kernels
save shows only in their company: each is set up while the one before it runs.
"""

from __future__ import annotations

import statistics
import sys
from unittest.mock import patch

import torch

from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.executor.cuda_executor import CudaExecutor, DecodeGraph
from bough.executor.graphs import replay_s
from bough.kernels.decode_attention import triton as plain
from bough.kernels.decode_attention.triton import DecodeConfig
from bough.kernels.projected_decode import triton as projected
from bough.loader.shapes import find_files

ROWS, KEYS = (1, 4, 8, 16), (130, 400, 1000, 4000)
CONFIGS = [DecodeConfig(128, 4, 1), DecodeConfig(64, 4, 1)]
FEW_PARTS = (1, 4, 8, 1000)  # up to so many they are weighed one by one
REPLAYS, COLD_REPLAYS = 40, 10


def build(shape: str) -> CudaExecutor:
    tokens = 1 + max(ROWS) * max(KEYS)
    settings = Settings.from_flat({"model_shape": shape, "context_length": 8192, "max_total_tokens": tokens})
    executor = build_executor(find_files(settings.model), settings).executor
    assert isinstance(executor, CudaExecutor)
    for layer in (*executor._pool.keys, *executor._pool.values):
        layer.normal_()
    return executor


@torch.inference_mode()
def capture(executor: CudaExecutor, rows: int, config: DecodeConfig | None, few_parts: int) -> DecodeGraph:
    """A step of so many rows; without a configuration, in launches of their own."""
    chosen = patch.object(projected, "config_for", lambda head_dim: config)
    with chosen, patch.object(projected, "FEW_PARTS", few_parts), patch.object(plain, "FEW_PARTS", few_parts):
        return executor._capture_decode(rows, few_keys=config is not None)


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
    times = [1e6 * replay_s(graph.forward.replay) for _ in range(REPLAYS)]
    return statistics.median(times[COLD_REPLAYS:])


def main(shape: str) -> None:
    executor = build(shape)
    for rows in ROWS:
        graphs = {}
        for few in FEW_PARTS:
            graphs[f"apart, {few}"] = capture(executor, rows, None, few)
            for config in CONFIGS:
                graphs[f"{config.block_n} keys, {few}"] = capture(executor, rows, config, few)
        for keys in KEYS:
            place(executor, rows, keys)
            times = ", ".join(f"{name} {step_us(graph):.0f}" for name, graph in graphs.items())
            print(f"{rows} rows of {keys} keys: {times}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
