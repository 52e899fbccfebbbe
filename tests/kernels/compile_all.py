"""Compiles every Triton kernel ahead of time, through the very launches that the engine makes, for a device that need
not be there: `python tests/kernels/compile_all.py cuda 90` or `... hip gfx942`.

The interpreter, in which the other tests run, checks no types and knows no device. Nothing is run here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before any kernel is defined
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bough.kernels.activation.triton import gelu_tanh_mul, silu_mul
from bough.kernels.decode_attention.triton import decode_attention
from bough.kernels.decode_inputs.triton import decode_inputs_
from bough.kernels.embedding.triton import embedding
from bough.kernels.norm_rope_store.triton import norm_rope_store_
from bough.kernels.prefill_attention.blocks import query_blocks
from bough.kernels.prefill_attention.triton import config_for, prefill_attention
from bough.kernels.rms_norm.triton import rms_norm
from bough.kernels.sampling.triton import sample_rows
from bough.kernels.skinny_linear.triton import skinny_gate_up, skinny_linear, skinny_norm_linear
from bough.kernels.token_mask.triton import forbid_tokens_
from bough.sampling.state import SamplingState

ROWS, HEADS, KV_HEADS, VOCABULARY = 4, 8, 2, 1000


class AbsentDevice:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compile_launches(target: GPUTarget) -> None:
    """From here on a launch only compiles."""
    driver.set_active(AbsentDevice(target))
    run: Callable[..., Any] = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        began = time.monotonic()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        print(f"{self.__name__}: {time.monotonic() - began:.1f} s", flush=True)
        return kernel

    JITFunction.run = compile_only


def launch_attention(dtype: torch.dtype, head_dim: int) -> None:
    q = torch.zeros(ROWS, HEADS, head_dim, dtype=dtype)
    k, v = torch.zeros(2, ROWS, KV_HEADS, head_dim, dtype=dtype)
    keys, values = torch.zeros(2, 100, KV_HEADS, head_dim, dtype=dtype)
    table = torch.zeros(8, 16, dtype=torch.int32)
    rows, lengths = torch.arange(ROWS, dtype=torch.int32), torch.ones(ROWS, dtype=torch.int32)
    config = config_for(HEADS, KV_HEADS, head_dim, dtype)
    blocks = torch.from_numpy(query_blocks(np.array([2, 2], dtype=np.int32), config.block_queries))
    starts = torch.tensor([0, 2, 4], dtype=torch.int32)
    for window, softcap in ((None, None), (64, 30.0)):
        more: dict[str, Any] = {"page_size": 1, "scale": 0.1, "window": window, "softcap": softcap}
        decode_attention(q, keys, values, table, rows, lengths, None, **more)
        prefill_attention(
            q, k, v, keys, values, table, rows[:2], starts, lengths[:2], blocks, config=config, **more
        )  # fmt: skip
    qkv = torch.zeros(ROWS, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
    norm, angles, places = torch.ones(head_dim, dtype=dtype), torch.zeros(32, head_dim // 2), torch.arange(ROWS)
    for weight in (norm, None):
        norm_rope_store_(
            qkv, HEADS, KV_HEADS, weight, weight, 1e-5, False, angles, angles, places, places, keys, values
        )  # fmt: skip


def launch_layers(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(12, 256, dtype=dtype), torch.zeros(512, 256, dtype=dtype)
    norm = weight[0]
    rms_norm(x, norm, 1e-5, x.clone(), False)
    embedding(torch.zeros(ROWS, dtype=torch.int64), weight, 1.0)
    silu_mul(x)
    gelu_tanh_mul(x)
    if dtype != torch.float32:
        skinny_linear(x[:1], weight)
        skinny_linear(x, weight)
        skinny_norm_linear(x[:2], x[:2].clone(), norm, 1e-5, False, weight)
        skinny_gate_up(x[:2], None, norm, 1e-5, False, weight, "silu")


def launch_step(dtype: torch.dtype) -> None:
    small, long = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int64)
    decode_inputs_(small, small, small, torch.zeros(8, 16, dtype=torch.int32), long, long, long, long, 1)
    parameters = SamplingState(ROWS, VOCABULARY, "cpu").parameters
    for filtered in (False, True):
        sample_rows(torch.zeros(ROWS, VOCABULARY, dtype=dtype), torch.arange(ROWS), parameters, filtered)
    words = torch.zeros(ROWS, -(-VOCABULARY // 32), dtype=torch.int32)
    forbid_tokens_(torch.zeros(ROWS, VOCABULARY, dtype=dtype), words, torch.arange(ROWS))


if __name__ == "__main__":
    kind, arch = sys.argv[1:]
    if kind == "hip":
        triton.knobs.amd.use_buffer_ops = False  # as `sampling.triton` does where torch is made for AMD
    compile_launches(GPUTarget(kind, int(arch), 32) if kind == "cuda" else GPUTarget(kind, arch, 64))
    for each in (torch.bfloat16, torch.float16, torch.float32):
        print(each)
        launch_attention(each, 64)
        launch_layers(each)
        launch_step(each)
    print("all compiled")
