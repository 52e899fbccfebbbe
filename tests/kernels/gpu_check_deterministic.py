"""Checks on a GPU that rows have the same bits in any company, at the shapes of two models.

    PYTHONPATH=. python tests/kernels/gpu_check_deterministic.py [--only NAME]

Compared are products (against each other's rows, for every number of rows and by every tile), attention (whole
prompts, chunks, decodes split or not), norms, head kernels and activations. `SAME` or `DIFFERENT` ends each line.
Lines that begin with `ask` are questions about the hardware whose answer may be either: whether tiles of 16 rows, which
use other instructions, round as those of 64 do; whether torch's own products do; and whether attention may use tiles of
128 lines for prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from gpu_timing import compile_all, distance

from bough.kernels import triton_ops
from bough.kernels.invariant_attention.triton import (
    DecodeItems,
    InvariantConfig,
    config_for,
    invariant_attention,
    prefill_items,
)
from bough.kernels.invariant_linear.triton import (
    LARGE_TILES,
    SMALL_TILES,
    WIDE,
    LinearConfig,
    Tile,
    invariant_linear,
    piece_for,
)
from bough.kernels.logits.triton import log_normaliser
from bough.kernels.norm_rope_store.reference import QKNormRope
from tests.kernels.references import paged_attention as attention_reference

ROWS = (1, 2, 7, 16, 17, 64, 100, 256, 1000, 8192)
MANY = 8192
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
NARROW = Tile(16, 64, 128, num_warps=4, num_stages=3)  # rows of another instruction


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    def products(self) -> dict[str, tuple[int, int]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (queries + 2 * keys, self.hidden),
            "o": (self.hidden, queries),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }


MODELS = (
    Model("qwen0.6b", 1024, 3072, 16, 8, 128, 151936),
    Model("llama8b", 4096, 14336, 32, 8, 128, 128256),
)
failures: list[str] = []


def report(what: str, same: bool, *, question: bool = False) -> None:
    print(f"{'ask ' if question else ''}{what}: {'SAME' if same else 'DIFFERENT'}", flush=True)
    if not same and not question:
        failures.append(what)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)


# Products -------------------------------------------------------------------------------------------------------------


def check_product(name: str, n: int, k: int) -> None:
    most = MANY if n < 100_000 else 1000
    x, weight = randn(most, k), randn(n, k) * k**-0.5
    whole = invariant_linear(x, weight)
    exact = F.linear(x[:64].double(), weight.double())
    error = distance(whole[:64], exact)
    report(f"{name} n={n} k={k} piece={piece_for(n, k)}, error {error:.1e}, near the reference", error < 2e-2)
    wrong = [m for m in ROWS if m <= most and not torch.equal(invariant_linear(x[:m], weight), whole[:m])]
    wrong += [
        m for m in (1, 16, 100) if not torch.equal(invariant_linear(x[333 : 333 + m], weight), whole[333 : 333 + m])
    ]
    report(f"{name} rows in any company{f', not {wrong}' if wrong else ''}", not wrong)
    piece = piece_for(n, k)
    for tile in (WIDE, *LARGE_TILES, *SMALL_TILES, NARROW):
        if tile is WIDE and piece < k:
            continue
        got = invariant_linear(x[:100], weight, config=LinearConfig(tile, piece, parallel=True))
        what = f"{name} tile {tile.block_m}x{tile.block_n}x{tile.block_k}"
        report(what, torch.equal(got, whole[:100]), question=tile is NARROW)
    if piece >= k:
        equal = [m for m in ROWS if m <= most and torch.equal(F.linear(x[:m], weight), whole[:m])]
        report(f"{name} torch's product, the same for {equal} rows", len(equal) == len(ROWS), question=True)


# Attention ------------------------------------------------------------------------------------------------------------


class Attention:
    """Sequences of these lengths over scattered pages of one token."""

    def __init__(self, model: Model, lengths: list[int]) -> None:
        self.model, self.lengths = model, lengths
        total = sum(lengths)
        self.k, self.v = (randn(total, model.kv_heads, model.head_dim) for _ in range(2))
        self.q = randn(total, model.heads, model.head_dim)
        self.firsts = np.concatenate(([0], np.cumsum(lengths)))
        order = torch.randperm(total, device=DEVICE).int()
        self.table = torch.zeros((len(lengths), max(lengths)), dtype=torch.int32, device=DEVICE)
        for row, length in enumerate(lengths):
            self.table[row, :length] = order[self.firsts[row] : self.firsts[row] + length]
        self.config = config_for(model.heads, model.kv_heads, model.head_dim, DTYPE)
        self.scale = model.head_dim**-0.5

    def work(self, batch: int, config: InvariantConfig, window: int | None, split_items: int = 512) -> DecodeItems:
        shape = (batch, self.model.heads, self.model.head_dim, DEVICE)
        return DecodeItems(*shape, chunk=config.chunk, window=window, split_items=split_items)

    def inputs(self, parts: list[tuple[int, int, int]]) -> tuple[torch.Tensor, ...]:
        """Positions first..last of rows: (row, first, last) each."""
        q = torch.cat([self.q[self.firsts[row] + first : self.firsts[row] + last] for row, first, last in parts])
        rows = torch.tensor([row for row, _, _ in parts], dtype=torch.int32, device=DEVICE)
        starts = np.cumsum([0, *(last - first for _, first, last in parts)])
        lengths = torch.tensor([last for _, _, last in parts], dtype=torch.int32, device=DEVICE)
        return q, self.k, self.v, self.table, rows, torch.tensor(starts, dtype=torch.int32, device=DEVICE), lengths

    def prefill(
        self, parts: list[tuple[int, int, int]], config: InvariantConfig, window: int | None = None
    ) -> Callable[[], torch.Tensor]:
        lens = np.array([last - first for _, first, last in parts], dtype=np.int32)
        contexts = np.array([first for _, first, _ in parts], dtype=np.int32)
        items = torch.from_numpy(prefill_items(lens, contexts, config.block_queries, 0)).to(DEVICE)
        inputs, work = self.inputs(parts), self.work(1, config, window)
        options = {"page_size": 1, "scale": self.scale, "window": window, "config": config}
        call = partial(invariant_attention, *inputs, items, programs=len(items) - 1, partials=work.partials)
        return partial(call, split_rows=0, **options)

    def decode(
        self,
        parts: list[tuple[int, int, int]],
        config: InvariantConfig,
        window: int | None = None,
        split_items: int = 512,
    ) -> Callable[[], torch.Tensor]:
        inputs, work = self.inputs(parts), self.work(len(parts), config, window, split_items)
        work.plan(inputs[6])
        programs = work.programs(len(parts), self.model.heads // config.pack)
        options = {"page_size": 1, "scale": self.scale, "window": window, "config": config}
        call = partial(invariant_attention, *inputs, work.items, programs=programs, partials=work.partials)
        return partial(call, split_rows=len(parts), **options)


def questions(config: InvariantConfig) -> dict[str, InvariantConfig]:
    """Tiles that may or may not give the same bits."""
    return {
        "tiles of 128 lines": replace(config, block_m=128, num_warps=8),
        "tiles of 16 lines": replace(config, block_m=16),
        "another number of stages": replace(config, num_stages=2),
    }


def check_attention(model: Model, window: int | None) -> None:
    name = f"{model.name} attention{'' if window is None else f', window {window}'}"
    length = 3000
    case = Attention(model, [length, 700, 1])
    whole = case.prefill([(0, 0, length)], case.config, window)()
    inputs = [t.float() if t.is_floating_point() else t for t in case.inputs([(0, 0, length)])]
    exact = attention_reference.invariant_attention(*inputs, None, page_size=1, scale=case.scale, window=window)
    report(f"{name}, near the reference", distance(whole, exact) < 2e-2)
    for chunk in (1, 33, 500, 1024):
        spans = [(first, min(first + chunk, length)) for first in range(0, length, max(chunk, 61))]
        wrong = [
            span
            for span in spans
            if not torch.equal(
                case.prefill([(1, 0, 700), (0, *span)], case.config, window)()[700:], whole[slice(*span)]
            )
        ]
        report(f"{name} in chunks of {chunk}{f', not {wrong[:4]}' if wrong else ''}", not wrong)
    places = [0, 1, 62, 63, 64, 127, 511, 512, 513, 1023, 1024, 2047, 2500, 2998, 2999]
    for split_items in (512, 0):
        decodes = case.decode([(0, at, at + 1) for at in places], case.config, window, split_items)()
        wrong_places = [at for i, at in enumerate(places) if not torch.equal(decodes[i], whole[at])]
        what = f"{name} decodes, {'split' if split_items else 'whole'}{f', not {wrong_places}' if wrong_places else ''}"
        report(what, not wrong_places)
    for what, config in questions(case.config).items():
        got = case.prefill([(0, 0, length)], config, window)()
        report(f"{name}, {what}", torch.equal(got, whole), question=True)


# Everything else ------------------------------------------------------------------------------------------------------


def check_rest(model: Model) -> None:
    x, residual, gate_up = randn(MANY, model.hidden), randn(MANY, model.hidden), randn(MANY, 2 * model.inner)
    lines = model.heads + 2 * model.kv_heads
    qkv, weight = randn(MANY, lines, model.head_dim), randn(model.head_dim)
    angles = torch.rand(2, MANY, model.head_dim // 2, device=DEVICE)
    logits = torch.randn(1000, model.vocab, device=DEVICE)
    norm_weight = randn(model.hidden)

    def heads(m: int) -> torch.Tensor:
        turned, places = qkv[:m].clone(), torch.arange(m, device=DEVICE)
        caches = torch.zeros(2, m, model.kv_heads, model.head_dim, dtype=DTYPE, device=DEVICE)
        shape = (model.heads, model.kv_heads, QKNormRope(weight, weight, 1e-6, False, *angles))
        triton_ops.invariant_store_(turned, *shape, places, places, *caches)
        return turned

    def norm(m: int) -> torch.Tensor:
        return torch.cat(triton_ops.invariant_norm(x[:m], norm_weight, 1e-6, residual[:m].clone()))

    operations: dict[str, tuple[int, Callable[[int], torch.Tensor]]] = {
        "norm": (MANY, lambda m: norm(m).view(2, m, -1).transpose(0, 1)),
        "head norms": (MANY, heads),
        "silu": (MANY, lambda m: triton_ops.invariant_gate(gate_up[:m], "silu")),
        "gelu": (MANY, lambda m: triton_ops.invariant_gate(gate_up[:m], "gelu_tanh")),
        "normaliser": (1000, lambda m: log_normaliser(logits[:m])[1]),
    }
    for name, (most, operation) in operations.items():
        whole = operation(most)
        wrong = [m for m in ROWS if m <= most and not torch.equal(operation(m), whole[:m])]
        report(f"{model.name} {name}{f', not {wrong}' if wrong else ''}", not wrong)


def warm_up() -> None:
    """Compiles the tiles side by side."""
    x, weight = randn(64, 1024), randn(1024, 1024)
    tiles = (WIDE, *LARGE_TILES, *SMALL_TILES, NARROW)
    cuts = [
        LinearConfig(tile, piece, False) for tile in tiles for piece in (1024, 512) if tile is not WIDE or piece == 1024
    ]
    cuts += [LinearConfig(tile, 512, True) for tile in tiles if tile is not WIDE]
    launches: list[Callable[[], object]] = [partial(invariant_linear, x, weight, config=cut) for cut in cuts]
    for model in MODELS:
        case = Attention(model, [64])
        configs = (case.config, *questions(case.config).values())
        launches += [case.prefill([(0, 0, 64)], config) for config in configs]
    compile_all(launches)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parser.parse_args()
    torch.manual_seed(0)
    models = [model for model in MODELS if options.only in model.name]
    warm_up()
    for model in models:
        for name, (n, k) in model.products().items():
            check_product(f"{model.name} {name}", n, k)
        check_attention(model, None)
        check_rest(model)
        torch.cuda.empty_cache()
    check_attention(models[0], 300)
    print(f"{len(failures)} failures" + "".join(f"\n  {failure}" for failure in failures))
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
