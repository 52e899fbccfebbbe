# mypy: disable-error-code="import-untyped"
"""Compiles every Triton kernel ahead of time, through the very launches that the engine makes, for a device that need
not be there, and checks that each fits its shared memory: `python tests/kernels/compile_all.py cuda 90`, or
`... hip gfx942`. With `--sample largest`, only attention of wide heads, which needs the most of it; with
`--sample usual`, every kernel once, in bfloat16 with heads of 128; with `--sample latents`, latent attention, and with
`--sample states`, recurrent layers; with `--sample lora`, adapters.

The interpreter, in which the other tests run, checks no types and knows no device. Nothing is run here.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
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

from bough.core.model_config import MoEConfig
from bough.kernels.activation.triton import gated_mul
from bough.kernels.decode_attention import triton as decode
from bough.kernels.decode_attention.shared import SharedWork
from bough.kernels.drafted_decode.triton import count_held_, decode_inputs_, drafted_inputs_
from bough.kernels.embedding.triton import embedding
from bough.kernels.experts import triton as expert_cuts
from bough.kernels.experts.fp4 import Fp4Rows
from bough.kernels.experts.reference import Spread
from bough.kernels.experts.triton import multiply
from bough.kernels.invariant_attention import triton as invariant
from bough.kernels.invariant_attention.triton import DecodeItems
from bough.kernels.invariant_linear import triton as invariant_tiling
from bough.kernels.invariant_linear.triton import invariant_linear
from bough.kernels.latent_attention import triton as latents
from bough.kernels.logits.triton import count_tokens_, forbid_tokens_, log_normaliser, penalise
from bough.kernels.lora.reference import FEW_ROWS, MANY_ROWS, AdapterStack, GroupedRows, tiles_of
from bough.kernels.lora.triton import lora_
from bough.kernels.norm_rope_store.reference import QKNormRope
from bough.kernels.norm_rope_store.triton import norm_rope_store_
from bough.kernels.ops import ExpertMatrices, Norm, Router
from bough.kernels.page_copy.triton import copy_pages_
from bough.kernels.prefill_attention import triton as prefill
from bough.kernels.prefill_attention.triton import query_blocks
from bough.kernels.projected_decode.triton import projected_decode
from bough.kernels.quantize_rows.reference import QuantizedRows, empty_rows
from bough.kernels.quantize_rows.triton import gated_quantize_rows, norm_quantize_rows, quantize_rows
from bough.kernels.recurrence.reference import StateRows
from bough.kernels.recurrence.triton import causal_conv_, recurrence_, recurrence_by_tokens_
from bough.kernels.rms_norm.triton import rms_norm
from bough.kernels.routing.triton import norm_route, placed, route
from bough.kernels.sampling.triton import sample_rows
from bough.kernels.scaled_linear.triton import scaled_linear, weight_linear
from bough.kernels.shared_memory import PLENTY
from bough.kernels.skinny_linear.triton import config_for, fitted, skinny_gate_up, skinny_linear, skinny_norm_linear
from bough.kernels.sparse_index.triton import choose_slots, index_store_
from bough.kernels.w4_linear.reference import W4Rows
from bough.kernels.w4_linear.triton import w4_dequantize, w4_linear, w4_norm_gate_up, w4_norm_linear
from bough.sampling.state import SamplingState

ROWS, HEADS, KV_HEADS, VOCABULARY = 4, 8, 2, 151_936
HIDDEN, INNER = 4096, 14336
HEAD_DIMS = (64, 80, 96, 128, 256, 512)
EDGES = (64, 256)  # heads that are also compiled with a window and capped scores
SUNK = 128  # and with sinks
LATENT_HEADS = (16, 128)
INDEX_HEADS = (32, 64)
SHARED_BYTES = {  # that a program may have
    "80": 166_912,
    "86": 101_376,
    "89": 101_376,
    "90": 232_448,
    "100": 232_448,
    "120": 101_376,
    "gfx90a": 65_536,
    "gfx942": 65_536,
}
EIGHT_BITS = ("89", "90", "100", "120", "gfx942")  # have the type of 8-bit weights and activations
EIGHT_BIT_TILES = ("90", "100", "120")  # and are given tiles of them


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
    """From here on a launch only compiles, and fails if the device would not have the shared memory."""
    driver.set_active(AbsentDevice(target))
    run: Callable[..., Any] = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        began = time.monotonic()
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        shared = kernel.metadata.shared
        print(f"{self.__name__}: {time.monotonic() - began:.1f} s, {shared} B of shared memory", flush=True)
        room = SHARED_BYTES[str(target.arch)]
        assert shared <= room, f"{self.__name__} wants {shared} B of shared memory, {target.arch} has {room}"
        return kernel

    JITFunction.run = compile_only


class Attention:
    """Attention of one kind of head, in tiles for a device with so much shared memory."""

    def __init__(self, dtype: torch.dtype, head_dim: int, room: int) -> None:
        self._dtype, self._head_dim, self._room = dtype, head_dim, room
        self._q = torch.zeros(ROWS, HEADS, head_dim, dtype=dtype)
        self._table = torch.zeros(8, 16, dtype=torch.int32)
        self._rows, self._lengths = torch.arange(ROWS, dtype=torch.int32), torch.ones(ROWS, dtype=torch.int32)

    def prefill(self, cache: torch.dtype, **more: Any) -> None:
        k, v = torch.zeros(2, ROWS, KV_HEADS, self._head_dim, dtype=self._dtype)
        config = prefill.config_for(HEADS, KV_HEADS, self._head_dim, self._dtype, room=self._room)
        alone = torch.from_numpy(query_blocks(np.array([2, 2], dtype=np.int32), config.block_queries))
        together = torch.tensor([[0, 0, 2, 0]], dtype=torch.int32)
        places = (self._rows[:2], torch.tensor([0, 2, 4], dtype=torch.int32), self._lengths[:2])
        given = (self._q, k, v, *self._caches(cache), self._table, *places)
        for blocks in (alone,) if more.get("window") else (alone, together):
            prefill.prefill_attention(*given, blocks, page_size=1, scale=0.1, config=config, **more)

    def decode(self, cache: torch.dtype, **more: Any) -> None:
        wide = self._dtype if self._dtype.itemsize > 2 else cache
        config = decode.config_for(self._head_dim, HEADS // KV_HEADS, wide, room=self._room)
        keys, values = self._caches(cache)
        places = (self._table, self._rows, self._lengths)
        decode.decode_attention(
            self._q, keys, values, *places, work=None, page_size=1, scale=0.1, config=config, **more
        )

    def invariant(self, cache: torch.dtype, **more: Any) -> None:
        config = invariant.config_for(HEADS, KV_HEADS, self._head_dim, self._dtype, room=self._room)
        work = DecodeItems(ROWS, HEADS, self._head_dim, torch.device("cpu"), chunk=config.chunk)
        work.plan(self._lengths)
        invariant.invariant_attention(
            self._q,
            *self._caches(cache),
            self._table,
            self._rows,
            torch.arange(ROWS + 1, dtype=torch.int32),
            self._lengths,
            work.items,
            programs=8,
            partials=work.partials,
            split_rows=ROWS,
            page_size=1,
            scale=0.1,
            config=config,
            **more,
        )

    def store(self) -> None:
        for weight in (torch.ones(self._head_dim, dtype=self._dtype), None):
            norm_rope_store_(*self._projection(weight))

    def projected(self, aheads: Sequence[bool] = (False,), **more: Any) -> None:
        for weight in (torch.ones(self._head_dim, dtype=self._dtype), None):
            inputs: list[Any] = [*self._projection(weight), self._table, self._rows, self._lengths, None]
            for ahead in aheads:
                projected_decode(*inputs, page_size=1, scale=0.1, ahead=ahead, **more)

    def _projection(self, weight: torch.Tensor | None) -> tuple[Any, ...]:
        """Queries, keys and values before they are stored, and all that belongs to them."""
        qkv = torch.zeros(ROWS, HEADS + 2 * KV_HEADS, self._head_dim, dtype=self._dtype)
        angles, places = torch.zeros(32, self._head_dim // 2), torch.arange(ROWS)
        shape = (HEADS, KV_HEADS, QKNormRope(weight, weight, 1e-5, False, angles, angles))
        return qkv, *shape, places, places, *self._caches(self._dtype)

    def _caches(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (100, KV_HEADS, self._head_dim)
        return torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)


def launch_attention(dtype: torch.dtype, head_dim: int, arch: str) -> None:
    attention = Attention(dtype, head_dim, SHARED_BYTES[arch])
    attention.store()
    caches = [dtype]
    if dtype == torch.bfloat16 and arch in EIGHT_BITS:
        caches.append(torch.float8_e4m3fn)
    for cache in caches:
        for kind in (attention.prefill, attention.decode, attention.invariant):
            kind(cache)
        if SHARED_BYTES[arch] >= PLENTY:  # elsewhere shared prefixes are read row by row
            attention.decode(cache, shared=SharedWork(ROWS, HEADS, KV_HEADS, head_dim, torch.device("cpu")))
    if dtype != torch.float32:
        attention.projected((False, True) if head_dim in EDGES else (False,))
        attention.projected(columns=ROWS // 2)
        if head_dim in EDGES:
            attention.projected(window=64, softcap=30.0)
    if head_dim in EDGES:
        for kind in (attention.prefill, attention.decode, attention.invariant):
            kind(dtype, window=64, softcap=30.0)
        attention.prefill(dtype, window=64, chunked=True)
        attention.invariant(dtype, window=64, chunked=True)
    if head_dim == SUNK:
        for kind in (attention.prefill, attention.decode, attention.invariant):
            kind(dtype, sinks=torch.zeros(HEADS, dtype=dtype))
        if dtype != torch.float32:
            attention.projected(sinks=torch.zeros(HEADS, dtype=dtype))


def launch_latents(heads: int, arch: str) -> None:
    """Latent attention of DeepSeek's widths, in bfloat16: the type of all its models."""
    rank, rope, nope, value, dtype, room = 512, 64, 128, 128, torch.bfloat16, SHARED_BYTES[arch]
    q = torch.zeros(ROWS, heads, nope + rope, dtype=dtype)
    weight = torch.zeros(heads, nope + value, rank, dtype=dtype)
    line, angles, places = torch.zeros(ROWS, rank + rope, dtype=dtype), torch.zeros(32, rope // 2), torch.arange(ROWS)
    table, rows = torch.zeros(8, 16, dtype=torch.int32), torch.arange(ROWS, dtype=torch.int32)
    lengths, starts = torch.ones(ROWS, dtype=torch.int32), torch.arange(ROWS + 1, dtype=torch.int32)
    absorbed = latents.absorb(q, weight, nope)
    latents.absorb(q.expand(ROWS, -1, -1).repeat(32, 1, 1), weight, nope)
    latents.lift(absorbed[..., :rank], weight, nope)
    for cache_type in (dtype, torch.float8_e4m3fn) if arch in EIGHT_BITS else (dtype,):
        cache = torch.zeros(100, 1, rank + rope).to(cache_type)
        latents.latent_store_(q, line, line[0, :rank], 1e-6, angles, angles, places, places, cache)
        caches, reading = (cache, cache[..., :rank]), (table, rows)
        config = decode.latent_config_for(heads // decode.head_blocks(heads), cache_type, room=room)
        decode.decode_attention(absorbed, *caches, *reading, lengths, None, page_size=1, scale=0.1, config=config)
        same = invariant.config_for(heads, 1, rank, dtype, room=room)
        work = DecodeItems(ROWS, heads, rank, torch.device("cpu"), chunk=same.chunk)
        shared = {"programs": 8, "partials": work.partials, "split_rows": ROWS, "page_size": 1, "scale": 0.1}
        items: Any = work.items
        invariant.invariant_attention(absorbed, *caches, *reading, starts, lengths, items, config=same, **shared)
    made, blocks = torch.zeros(ROWS, heads, nope + value, dtype=dtype), torch.zeros(1, 2, dtype=torch.int32)
    places = (starts, starts[:-1], lengths, blocks)
    config = latents.config_for(dtype, room=room)
    latents.expanded_attention(q, made, line[:, rank:], *places, scale=0.1, out=made[..., :value], config=config)


def launch_layers(dtype: torch.dtype, arch: str) -> None:
    x, weight = torch.zeros(12, HIDDEN, dtype=dtype), torch.empty(VOCABULARY, HIDDEN, dtype=dtype)
    norm = weight[0]
    rms_norm(x, norm, 1e-5, x.clone(), False)
    embedding(torch.zeros(ROWS, dtype=torch.int64), weight, 1.0)
    for size in (1, 64):
        table, lines = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(ROWS, size, dtype=torch.uint8)
        copy_pages_(table, (size,), torch.zeros(ROWS, dtype=torch.int64), lines, into_pages=size > 1)
    gated_mul(x, "silu")
    gated_mul(x, "gelu_tanh")
    for rows in (4, 100, 2048):  # tiles of each size
        for outputs in (512, INNER):  # in several pieces, and in one
            whole = invariant_tiling.config_for(rows, outputs, HIDDEN, dtype.itemsize)
            cut = invariant_tiling.fitted(whole, dtype.itemsize, SHARED_BYTES[arch])
            invariant_linear(torch.zeros(rows, HIDDEN, dtype=dtype), weight[:outputs], config=cut)
    if dtype != torch.float32:
        for rows, outputs in ((1, INNER), (12, 512), (12, INNER), (12, VOCABULARY)):  # each kind of cut
            skinny = fitted(config_for(rows, outputs, HIDDEN), 2, SHARED_BYTES[arch])
            skinny_linear(x[:rows], weight[:outputs], config=skinny)
        skinny_norm_linear(x[:2], x[:2].clone(), norm, 1e-5, False, weight)
        skinny_gate_up(x[:2], None, norm, 1e-5, False, weight, "silu")
        for group in (32, 128):
            launch_w4(dtype, group, arch)
        if arch in EIGHT_BITS:
            quantize_rows(x)
            norm_quantize_rows(x, norm, 1e-5, x.clone())
            gated_quantize_rows(x, "silu")
        if arch in EIGHT_BIT_TILES:
            launch_grouped(dtype)


def launch_grouped(dtype: torch.dtype) -> None:
    """With weights of 8 bits that have a scale for every 128 inputs."""
    norm, weight = torch.ones(HIDDEN, dtype=dtype), empty_rows(INNER, HIDDEN, group=128, device=torch.device("cpu"))
    for rows in (1, 2, 12):
        weight_linear(torch.zeros(rows, HIDDEN, dtype=dtype), weight, None)
    x = torch.zeros(2048, HIDDEN, dtype=dtype)
    small, _ = norm_quantize_rows(x, norm, 1e-5, x.clone(), group=128)
    gated_quantize_rows(x, "silu", 128)
    for rows, outputs in ((2048, INNER), (60, INNER), (20, 8192), (20, 512)):  # each kind of cut
        some = (QuantizedRows(*(part[:count] for part in side)) for side, count in ((small, rows), (weight, outputs)))
        scaled_linear(*some, None, dtype)


def launch_experts(dtype: torch.dtype, arch: str) -> None:
    moe = MoEConfig(32, 4, 256, scores="sigmoid", correction_bias=True, groups=4, top_groups=2)
    gate_up, down = torch.zeros(32, 512, 256, dtype=dtype), torch.zeros(32, 256, 256, dtype=dtype)
    biased = ExpertMatrices(gate_up, down, gate_up[:, :, 0].clone(), down[:, :, 0].clone(), (1.7, 7.0))
    others = MoEConfig(32, 2, 256, scores="sparsemixer", jitter=0.01)
    bias, norm = torch.zeros(32), Norm(torch.ones(256, dtype=dtype), 1e-6, False)
    for tokens in (1, 8, 32, 160, 512, 1024):  # each kind of cut
        x = torch.zeros(tokens, 256, dtype=dtype)
        routed = route(torch.zeros(tokens, 32, dtype=dtype), moe, bias, count=tokens > 16)
        sizes = (dtype.itemsize, dtype.itemsize, SHARED_BYTES[arch])
        cut = expert_cuts.fitted(expert_cuts.config_for(tokens, 4, 32), *sizes)
        multiply(x, ExpertMatrices(gate_up, down), routed, "silu", config=None if tokens == 1 else cut)
        if tokens in (1, 8, 1024):
            multiply(x, biased, routed, "silu", config=None if tokens == 1 else cut)
            without_gates = ExpertMatrices(gate_up[:, : down.shape[2]].contiguous(), down)
            multiply(x, without_gates, routed, "relu2", config=None if tokens == 1 else cut)
        for group in (0, 128) if arch in EIGHT_BIT_TILES and tokens != 32 else ():  # whose cut is that of 8
            small = [empty_rows(*matrices.shape, group=group, device=x.device) for matrices in (gate_up, down)]
            wide = expert_cuts.config_for(tokens, 4, 32, fp8=True, grouped=group > 0)
            cut = expert_cuts.fitted(wide, dtype.itemsize, 1, SHARED_BYTES[arch])
            multiply(x, ExpertMatrices(*small), routed, "silu", config=None if tokens == 1 else cut)
        for group in (32, 128) if dtype != torch.float32 and tokens in (8, 160, 1024) else ():
            packed = [
                W4Rows(
                    torch.zeros(*m.shape[:2], m.shape[2] // 8, dtype=torch.int32),
                    torch.zeros(*m.shape[:2], m.shape[2] // group, dtype=torch.float16),
                    torch.zeros(*m.shape[:2], m.shape[2] // group, dtype=torch.uint8),
                )
                for m in (gate_up, down)
            ]
            cut = expert_cuts.fitted(expert_cuts.w4_config_for(tokens, 4, 32), dtype.itemsize, 1, SHARED_BYTES[arch])
            multiply(x, ExpertMatrices(*packed), routed, "silu", config=cut)
            if group == 32:
                floats = [Fp4Rows(part.words, part.zeros) for part in packed]
                multiply(x, ExpertMatrices(*floats, *biased[2:]), routed, "silu", config=cut)
        spread = Spread(routed.ids.new_zeros(32, 2), routed.ids.new_ones(32), 2, bias.long())
        placed(placed(routed, spread, count=False), None, count=tokens > 16)
        norm_route(x, x, norm, Router(gate_up[0, :32], bias), moe, count=tokens > 16)
        norm_route(x, x, norm, Router(gate_up[0, :32], None, down[0, 0, :32]), others, count=tokens > 16)


def launch_w4(dtype: torch.dtype, group: int, arch: str) -> None:
    scales = torch.empty(INNER, HIDDEN // group, dtype=torch.float16)
    weight = W4Rows(torch.empty(INNER, HIDDEN // 8, dtype=torch.int32), scales, scales.to(torch.uint8))
    few = W4Rows(*(part[:HIDDEN] for part in weight))
    for rows in (1, 12, 24, 100):  # by rows, and by tiles of each kind
        for outputs in (weight, few):
            w4_linear(torch.zeros(rows, HIDDEN, dtype=dtype), outputs, room=SHARED_BYTES[arch])
    x, norm = torch.zeros(1, HIDDEN, dtype=dtype), Norm(torch.ones(HIDDEN, dtype=dtype), 1e-5, False)
    w4_norm_linear(x, x.clone(), norm, weight)
    w4_norm_gate_up(x, x.clone(), norm, weight, "silu")
    w4_dequantize(weight, HIDDEN, dtype)


def launch_lora(dtype: torch.dtype) -> None:
    """Adapters of the least rank and of the largest, over q, k and v."""
    bands = (slice(0, 4096), slice(4096, 5120), slice(5120, 6144))
    x, slots = torch.zeros(ROWS, HIDDEN, dtype=dtype), torch.zeros(ROWS, 3)
    for rank in (16, 256):
        tiles = torch.from_numpy(tiles_of(bands))
        down, up = torch.empty(1, 3, rank, HIDDEN, dtype=dtype), torch.empty(1, 6144, rank, dtype=dtype)
        stack = AdapterStack(down, up, slots[:1].int(), tiles)
        for block_rows in (FEW_ROWS, MANY_ROWS):
            grouped = GroupedRows(slots[:, 0].int(), slots.int(), slots[:, 0].int(), block_rows)
            lora_(torch.zeros(ROWS, 6144, dtype=dtype), x, stack, grouped)
        # Of 32 heads, from queries of which 128 numbers are multiplied to latents of which 512 are.
        tiles = torch.from_numpy(tiles_of([slice(576 * head, 576 * head + 512) for head in range(32)], [0] * 32))
        down, up = up.view(1, 32, 192, rank)[:, :, :128].transpose(2, 3), down[:, 0, :, :512].transpose(1, 2)
        stack = AdapterStack(down, up, slots[:1, :1].int().expand(-1, 32), tiles, step=192)
        lora_(torch.zeros(ROWS, 576 * 32, dtype=dtype), torch.zeros(ROWS, 6144, dtype=dtype), stack, grouped)


def launch_states(dtype: torch.dtype, arch: str) -> None:
    """Recurrences of Qwen's, Kimi's and Mamba's widths."""
    table, rows = torch.zeros(8, 16, dtype=torch.int32), torch.arange(ROWS, dtype=torch.int32)
    starts = torch.arange(ROWS + 1, dtype=torch.int32)
    steps = [StateRows(table, rows, starts.numpy(), each) for each in (None, starts)]
    precision = "ieee" if arch.startswith("gfx") or dtype == torch.float32 else "tf32"
    for key_dim, value_dim, delta in ((128, 128, True), (128, 64, False), (256, 64, False)):
        q, k = (torch.zeros(ROWS, 2, key_dim, dtype=dtype) for _ in range(2))
        v, decay = torch.zeros(ROWS, 4, value_dim, dtype=dtype), torch.zeros(ROWS, 4)
        beta, matrices = v[..., 0] if delta else None, torch.zeros(9, 4, key_dim, value_dim)
        for step in steps:
            recurrence_(q, k, v, decay, beta, matrices, step, precision=precision)
            recurrence_by_tokens_(q, k, v, decay[..., None].expand(-1, -1, key_dim), beta, matrices, step)
    x, tails, weight = torch.zeros(ROWS, 512, dtype=dtype), torch.zeros(9, 3, 512), torch.zeros(512, 4, dtype=dtype)
    for step in steps:
        for bias, silu in ((weight[:, 0].contiguous(), True), (None, False)):
            causal_conv_(x, weight, bias, tails, step, silu)


def launch_step(dtype: torch.dtype) -> None:
    small, long = torch.zeros(ROWS, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int64)
    decode_inputs_(small, small, small, torch.zeros(8, 16, dtype=torch.int32), long, long, long, long, 1)
    drafted, of_rows, tables = torch.zeros(ROWS, 11, dtype=torch.int32), (small, small, long), torch.zeros(1, 8, 16)
    drafted_inputs_(drafted, of_rows, tables.int(), small.repeat(2, 1), long.repeat(3, 1), 1)
    count_held_(drafted, of_rows, long, long, long, long.bool(), long.repeat(2), long)
    state = SamplingState(ROWS, VOCABULARY, "cpu")
    parameters, lines = state.parameters, state.penalty_lines(np.arange(ROWS), np.arange(ROWS, dtype=np.int32))
    logits = torch.zeros(ROWS, VOCABULARY, dtype=dtype)
    for filtered in (False, True):
        sample_rows(logits, torch.arange(ROWS), parameters, filtered)
    penalise(logits, lines, state.penalties)
    count_tokens_(state.penalties.counts, lines.count_slots, long)
    log_normaliser(logits)
    forbid_tokens_(logits, torch.zeros(ROWS, -(-VOCABULARY // 32), dtype=torch.int32), torch.arange(ROWS))


def launch_all(arch: str) -> None:
    """Half-precision kernels differ from bfloat16's in types alone: one head is enough."""
    for dtype, head_dims in ((torch.bfloat16, HEAD_DIMS), (torch.float32, HEAD_DIMS), (torch.float16, HEAD_DIMS[:1])):
        print(dtype)
        launch_layers(dtype, arch)
        launch_lora(dtype)
        launch_states(dtype, arch)
        launch_step(dtype)
        for head_dim in head_dims:
            print(f"heads of {head_dim}")
            launch_attention(dtype, head_dim, arch)
    launch_of_latents(arch)


def launch_largest(arch: str) -> None:
    """Of prefill attention and invariant attention what wants the most shared memory."""
    room = SHARED_BYTES[arch]
    for head_dim in (256, 512):
        Attention(torch.bfloat16, head_dim, room).prefill(torch.bfloat16)
    Attention(torch.bfloat16, 128, room).invariant(torch.bfloat16)


def launch_usual(arch: str) -> None:
    launch_layers(torch.bfloat16, arch)
    launch_experts(torch.bfloat16, arch)
    launch_lora(torch.bfloat16)
    launch_states(torch.bfloat16, arch)
    launch_step(torch.bfloat16)
    launch_attention(torch.bfloat16, 128, arch)


def launch_sparse_index(heads: int) -> None:
    """That of DeepSeek V3.2 and GLM-5."""
    dim, dtype, table = 128, torch.bfloat16, torch.zeros(8, 4096, dtype=torch.int32)
    q, weights, cache = (torch.zeros(*shape, dtype=dtype) for shape in ((ROWS, heads, dim), (ROWS, heads), (100, dim)))
    angles, places, rows = torch.zeros(32, 32), torch.arange(ROWS), torch.arange(ROWS, dtype=torch.int32)
    index_store_(q, cache[:ROWS], cache[0], cache[0], 1e-6, angles, angles, places, places, cache)
    choose_slots(q, weights, cache, table, rows, rows, 2048, page_size=16)


def launch_of_latents(arch: str) -> None:
    for heads in LATENT_HEADS:
        launch_latents(heads, arch)
    for heads in INDEX_HEADS:
        launch_sparse_index(heads)


LAUNCHES = {
    "all": launch_all,
    "states": lambda arch: launch_states(torch.bfloat16, arch),
    "experts": lambda arch: launch_experts(torch.bfloat16, arch),
    "fp8": lambda arch: launch_grouped(torch.bfloat16),
    "latents": launch_of_latents,
    "lora": lambda arch: [launch_lora(dtype) for dtype in (torch.bfloat16, torch.float32)],
    "largest": launch_largest,
    "usual": launch_usual,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("cuda", "hip"))
    parser.add_argument("arch", choices=SHARED_BYTES)
    parser.add_argument("--sample", choices=LAUNCHES, default="all")
    asked = parser.parse_args()
    if asked.kind == "hip":
        triton.knobs.amd.use_buffer_ops = False  # as `sampling.triton` does where torch is made for AMD
    compile_launches(
        GPUTarget("cuda", int(asked.arch), 32) if asked.kind == "cuda" else GPUTarget("hip", asked.arch, 64)
    )
    LAUNCHES[asked.sample](asked.arch)
    print("all compiled")
