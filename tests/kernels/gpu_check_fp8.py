"""Checks everything that has 8 bits on a GPU, then times products and decode attention against bfloat16.

    PYTHONPATH=. python tests/kernels/gpu_check_fp8.py

First each kernel against float64. Then, for the linear layers of Llama 3.1 8B, microseconds in a CUDA graph over
rotating copies of the weight: `bf16` is what the engine's table of operations does (norm, product, gate), `fp8` the
same with quantised weights and the quantising of activations in it, `product` torch's scaled product alone, `exact`
that product with sums that are kept in float32 throughout. Last, decode attention over caches of each type in a few
cuts, of which `*` marks the one that is used.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from bough.layers.schemes.registry import scheme_for
from gpu_timing import compile_all, distance, graph_us, table_row

from bough.distributed.topology import Topology
from bough.kernels.decode_attention import triton as decode
from bough.kernels.decode_attention.work import DecodeWork, plan_decode
from bough.kernels.norm_rope_store.reference import QKNormRope
from bough.kernels.norm_rope_store.reference import norm_rope_store_ as plain_store
from bough.kernels.norm_rope_store.triton import norm_rope_store_
from bough.kernels.ops import Norm, NormedSum
from bough.kernels.quantize_rows import reference as plain
from bough.kernels.quantize_rows import triton as fast
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.kernels.registry import ops_for
from bough.kernels.scaled_linear.triton import scaled_linear
from bough.layers.schemes.base import LinearWeight, Part
from tests.fakes.context import NO_CONTEXT
from tests.fakes.placements import placed
from tests.kernels.references import paged_attention as plain_attention

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
ROTATION_BYTES = 160 << 20
ROWS = (1, 16, 256, 8192)
EPS = 1e-5
CUTS = ((64, 4, 3), (128, 4, 3), (128, 8, 3))  # keys, warps, stages
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def back(rows: QuantizedRows) -> torch.Tensor:
    return rows.values.double() * rows.scales.double()


def report(name: str, error: float, most: float) -> None:
    print(f"{'ok   ' if error < most else 'WRONG'} {name}: {error:.2e} (at most {most:.0e})", flush=True)


def share_unlike(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() != expected.float()).double().mean())


def check_quantizing() -> None:
    for rows, size in ((1, 4096), (300, 576), (257, 14336)):
        x, residual = torch.randn(2, rows, size, dtype=BF16, device=CUDA)
        weight = torch.rand(size, dtype=BF16, device=CUDA)
        gate_up = torch.randn(rows, 2 * size, dtype=BF16, device=CUDA)
        shape = f"{rows} x {size}"
        report(f"quantize_rows {shape}, values unlike", share_unlike(*_values(x)), 1e-3)
        report(f"quantize_rows {shape}, from float64", distance(back(fast.quantize_rows(x)), x.double()), 4e-2)
        found, stream = fast.norm_quantize_rows(x, weight, EPS, residual.clone())
        normed, expected = plain.norm_quantize_rows(x, weight, EPS, residual)
        report(f"norm_quantize_rows {shape}", distance(back(found), back(normed)), 1e-2)
        report(f"its sum {shape}", distance(stream, expected), 1e-6)
        gated = (f(gate_up, "silu") for f in (fast.gated_quantize_rows, plain.gated_quantize_rows))
        report(f"gated_quantize_rows {shape}", distance(*map(back, gated)), 1e-2)


def _values(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return fast.quantize_rows(x).values, plain.quantize_rows(x).values


def check_products() -> None:
    for rows in (1, 2, 3, 17, 300):
        x, weight = torch.randn(rows, 4096, device=CUDA), torch.randn(1024, 4096, device=CUDA)
        bias = torch.randn(1024, dtype=BF16, device=CUDA)
        sides = fast.quantize_rows(x), fast.quantize_rows(weight)
        exact = back(sides[0]) @ back(sides[1]).T + bias.double()
        report(f"scaled product of {rows} rows", distance(scaled_linear(*sides, bias, BF16), exact), 1e-2)


def check_storing() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        qkv = torch.randn(300, 48, 128, dtype=BF16, device=CUDA) * 300
        angle = torch.randn(300, 64, device=CUDA)
        slots = torch.randperm(600, device=CUDA)[:300]
        caches = torch.zeros(4, 600, 8, 128, device=CUDA).to(dtype)
        turn, where = (
            QKNormRope(None, None, EPS, False, angle.cos(), angle.sin()),
            (torch.arange(300, device=CUDA), slots),
        )
        for function, k, v in ((norm_rope_store_, *caches[:2]), (plain_store, *caches[2:])):
            function(qkv.clone(), 32, 8, turn, *where, k, v, 0.5, 2.0)
        report(f"stored as {dtype}, values unlike", share_unlike(caches[:2], caches[2:]), 1e-3)


class Attention:
    """Decodes of many lengths over one cache."""

    def __init__(self, batch: int, longest: int, dtype: torch.dtype) -> None:
        self.q = torch.randn(batch, 32, 128, dtype=BF16, device=CUDA)
        self.lengths = torch.randint(longest // 16, longest, (batch,), dtype=torch.int32, device=CUDA)
        pages = torch.randperm(batch * longest, device=CUDA).to(torch.int32) + 1
        self.table = pages.view(batch, longest)
        shape = (batch * longest + 1, 8, 128)
        self.caches = [torch.randn(shape, dtype=BF16, device=CUDA).to(dtype) for _ in range(2)]
        self.work = DecodeWork(batch, 32, 8, 128, CUDA)
        plan_decode(self.lengths, self.work)
        self.rows = torch.arange(batch, dtype=torch.int32, device=CUDA)
        self.options = {"page_size": 1, "scale": 128**-0.5, "k_scale": 0.5, "v_scale": 2.0}

    def run(self, number: int = 0, config: decode.DecodeConfig | None = None) -> torch.Tensor:
        inputs = (self.q, *self.caches, self.table, self.rows, self.lengths, self.work)
        return decode.decode_attention(*inputs, config=config, **self.options)  # type: ignore[arg-type]

    def error(self) -> float:
        inputs = (*self.caches, self.table, self.rows, self.lengths, None)
        exact = plain_attention.decode_attention(self.q.double(), *inputs, **self.options)  # type: ignore[arg-type]
        return distance(self.run(), exact)

    def gigabytes(self) -> float:
        return int(self.lengths.sum()) * 2 * 8 * 128 * self.caches[0].element_size() / 1e9


def check_attention() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        report(f"decode attention over {dtype}", Attention(5, 700, dtype).error(), 2e-2)


def weights(name: str, quantization: str) -> list[LinearWeight]:
    """Copies of one layer, enough that no cache serves them."""
    outputs, inputs = SHAPES[name]
    placement = placed(Topology(), BF16, CUDA, ops=ops_for(CUDA))
    scheme, part = scheme_for(quantization), Part("w", outputs, (slice(None),))
    values = torch.randn(outputs, inputs, dtype=BF16, device=CUDA) * inputs**-0.5
    made = []
    for _ in range(max(1, -(-ROTATION_BYTES // (outputs * inputs)))):
        weight = scheme(inputs, [part], False, placement)
        for slot in weight.slots(""):
            slot.fill(0, values)
        made.append(weight)
    return made


def launcher(name: str, rows: int, made: list[LinearWeight]) -> Callable[[int], object]:
    """What a step does with this layer: its norm before it, or the gate whose result it takes."""
    inputs = SHAPES[name][1]
    x, residual = torch.randn(2, rows, inputs, dtype=BF16, device=CUDA)
    norm = Norm(torch.rand(inputs, dtype=BF16, device=CUDA), EPS, False)
    gate_up = torch.randn(rows, 2 * inputs, dtype=BF16, device=CUDA)
    if name in ("qkv", "gate_up"):
        return lambda number: made[number % len(made)].after_norm(NormedSum(x, residual, norm), NO_CONTEXT)
    if name == "o":
        return lambda number: made[number % len(made)].linear(x, NO_CONTEXT)
    return lambda number: made[number % len(made)].linear(made[0].gate(gate_up, "silu"), NO_CONTEXT)


def product(name: str, rows: int, fast_sums: bool) -> Callable[[int], object]:
    outputs, inputs = SHAPES[name]
    x = fast.quantize_rows(torch.randn(rows, inputs, dtype=BF16, device=CUDA))
    w = fast.quantize_rows(torch.randn(outputs, inputs, dtype=BF16, device=CUDA))
    copies = [w.values.clone() for _ in range(max(1, -(-ROTATION_BYTES // (outputs * inputs))))]
    scales = {"scale_a": x.scales, "scale_b": w.scales.t()}

    def launch(number: int) -> object:
        side = copies[number % len(copies)].t()
        return torch._scaled_mm(x.values, side, **scales, out_dtype=BF16, use_fast_accum=fast_sums)

    return launch


def time_products() -> None:
    widths = (8, 5, 9, 9, 9, 9, 7, 9)
    print(table_row(("layer", "rows", "bf16 us", "fp8 us", "product", "exact", "speed", "TFLOP/s"), widths))
    for name, (outputs, inputs) in SHAPES.items():
        plain_weights, small_weights = weights(name, "none"), weights(name, "fp8")
        for rows in ROWS:
            replays = 3 if rows > 1000 else 7
            wide = graph_us(launcher(name, rows, plain_weights), replays)
            small = graph_us(launcher(name, rows, small_weights), replays)
            alone, exact = (graph_us(product(name, rows, quick), replays) for quick in (True, False))
            rate = 2 * rows * outputs * inputs / alone / 1e6
            cells = (
                f"{wide:.1f}",
                f"{small:.1f}",
                f"{alone:.1f}",
                f"{exact:.1f}",
                f"{wide / small:.2f}x",
                f"{rate:.0f}",
            )
            print(table_row((name, rows, *cells), widths), flush=True)
        del plain_weights, small_weights
        torch.cuda.empty_cache()


def time_attention() -> None:
    for batch, longest in ((256, 2048), (16, 8192)):
        for dtype in (BF16, torch.float8_e4m3fn, torch.float8_e5m2):
            case, chosen = Attention(batch, longest, dtype), decode.config_for(128, 4, dtype)
            cuts = list(dict.fromkeys([chosen, *(decode.DecodeConfig(*cut) for cut in CUTS)]))
            compile_all([partial(case.run, config=cut) for cut in cuts])
            for cut in cuts:
                us = graph_us(partial(case.run, config=cut), 3)
                label = f"{batch} decodes to {longest} keys, {dtype}, n{cut.block_n} w{cut.num_warps} s{cut.num_stages}"
                print(f"{'*' if cut == chosen else ' '} {label}: {us:.0f} us, {case.gigabytes() / us * 1e3:.2f} TB/s")
            torch.cuda.empty_cache()


def main() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        check_quantizing()
        check_products()
        check_storing()
        check_attention()
        time_products()
        time_attention()


if __name__ == "__main__":
    main()
