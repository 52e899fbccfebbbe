"""Times norm, activation and head kernels on a GPU at the shapes of two models, against the plain references.

    PYTHONPATH=. python tests/kernels/gpu_bench_elementwise.py

Each time is that of one launch in a CUDA graph of twenty. A line gives the reference's time, that of the configuration
which `config_for` chooses, and the best one (`*` where it is the chosen one) with the rate at which it moves bytes:
those that an ideal kernel reads and writes. Small inputs come from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from gpu_timing import compile_all, distance, graph_us, table_row

from bough.kernels.activation import reference as activation_reference
from bough.kernels.activation import triton as activation
from bough.kernels.norm_rope_store import reference as heads_reference
from bough.kernels.norm_rope_store import triton as head_kernel
from bough.kernels.rms_norm import reference as norm_reference
from bough.kernels.rms_norm import triton as norm

TOKENS = (1, 16, 256, 8192)
WIDTHS = (26, 7, 9, 9, 34, 9, 7, 7)
EPS = 1e-6


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    head_norm: bool


MODELS = (
    Model("qwen0.6b", 1024, 3072, 16, 8, 128, True),
    Model("llama8b", 4096, 14336, 32, 8, 128, False),
)


@dataclass
class Case:
    """One operation at one size: what to compare with, what to run, and the bytes it has to move."""

    name: str
    tokens: int
    moved: int
    reference: Callable[[], torch.Tensor]
    kernel: Callable[[object], torch.Tensor]  # of a configuration
    error: Callable[[], float]  # of the chosen configuration, on fresh inputs
    chosen: object
    others: Sequence[object]


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def norm_case(model: Model, tokens: int) -> Case:
    x, residual, weight = random(tokens, model.hidden), random(tokens, model.hidden), random(model.hidden)
    stream = residual.clone()

    def kernel(config: object) -> torch.Tensor:
        assert isinstance(config, norm.RowTiling)
        return norm.rms_norm(x, weight, EPS, stream, config=config)[0]

    def reference() -> torch.Tensor:
        return norm_reference.rms_norm(x, weight, EPS, residual)[0]

    def error() -> float:
        return distance(norm.rms_norm(x, weight, EPS, residual.clone())[0], reference())

    others = [norm.RowTiling(rows, warps) for rows in (1, 2) for warps in (2, 4, 8, 16)]
    chosen = norm.config_for(tokens, model.hidden)
    return Case(f"{model.name} add_norm", tokens, 4 * x.nbytes, reference, kernel, error, chosen, others)


def activation_case(model: Model, tokens: int) -> Case:
    x = random(tokens, 2 * model.inner)

    def kernel(config: object) -> torch.Tensor:
        assert isinstance(config, int)
        return activation.gated_mul(x, "silu", config=config)

    chosen = activation.config_for(tokens, model.inner)
    others = (256, 512, 1024, 2048, 4096)

    def reference() -> torch.Tensor:
        return activation_reference.gated_mul(x, "silu")

    def error() -> float:
        return distance(activation.gated_mul(x, "silu"), reference())

    return Case(f"{model.name} silu_mul", tokens, x.nbytes * 3 // 2, reference, kernel, error, chosen, others)


def heads_case(model: Model, tokens: int) -> Case:
    qkv = random(tokens, model.heads + 2 * model.kv_heads, model.head_dim)
    weights = random(2, model.head_dim) if model.head_norm else (None, None)
    angle = torch.rand(16384, model.head_dim // 2, device="cuda") * 6
    positions = torch.randint(16384, (tokens,), device="cuda")
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens]
    caches = random(2, 2 * tokens, model.kv_heads, model.head_dim)
    turn = heads_reference.QKNormRope(*weights, EPS, False, angle.cos(), angle.sin())
    shape = (model.heads, model.kv_heads, turn, positions, slots, *caches)

    def kernel(config: object) -> torch.Tensor:
        assert isinstance(config, head_kernel.HeadTiling)
        head_kernel.norm_rope_store_(qkv, *shape, config=config)
        return qkv

    def reference() -> torch.Tensor:
        heads_reference.norm_rope_store_(qkv, *shape)
        return qkv

    def error() -> float:
        ours, theirs = qkv.clone(), qkv.clone()
        head_kernel.norm_rope_store_(ours, *shape)
        stored = caches.clone()
        heads_reference.norm_rope_store_(theirs, *shape)
        return max(distance(ours, theirs), distance(stored, caches))

    chosen = head_kernel.config_for(tokens, model.heads, model.kv_heads, model.head_dim)
    others = [
        head_kernel.HeadTiling(heads, warps) for heads, warps in ((1, 1), (2, 1), (4, 1), (8, 2), (16, 4), (8, 4))
    ]
    turned = qkv.nbytes * (model.heads + model.kv_heads) // (model.heads + 2 * model.kv_heads)
    moved = qkv.nbytes + turned + 2 * (qkv.nbytes - turned) + angle[0].nbytes * 2 * tokens
    return Case(f"{model.name} norm_rope_store", tokens, moved, reference, kernel, error, chosen, others)


def timed(launch: Callable[[], object]) -> float:
    return graph_us(lambda _: launch())


def measure(case: Case) -> None:
    error = case.error()
    if not error < 2e-2:
        print(f"WRONG by {error:.3g}: {case.name}, {case.tokens} tokens")
    configs = [case.chosen, *(config for config in case.others if config != case.chosen)]
    fitting = compile_all([partial(case.kernel, config) for config in configs])
    times = {c: timed(partial(case.kernel, c)) for c, fits in zip(configs, fitting, strict=True) if fits}
    theirs = timed(case.reference)
    best = min(times, key=times.__getitem__)
    label = str(best) + (" *" if best == case.chosen else "")
    rate = case.moved / times[best] / 1e6
    cells = (f"{theirs:.2f}", f"{times[case.chosen]:.2f}", label, f"{times[best]:.2f}", f"{rate:.2f}")
    print(table_row((case.name, case.tokens, *cells, f"{theirs / times[best]:.1f}x"), WIDTHS), flush=True)


def main() -> None:
    print(table_row(("operation", "tokens", "plain us", "chosen us", "best", "us", "TB/s", "speed"), WIDTHS))
    for model in MODELS:
        for make in (norm_case, activation_case, heads_case):
            for tokens in TOKENS:
                measure(make(model, tokens))


if __name__ == "__main__":
    main()
