"""Times the products of one row with 4-bit weights as a decode step of an 8B model launches them:

    PYTHONPATH=. python tests/kernels/gpu_bench_w4_row.py [--layers 32] [--keys 300] [--sweep]

`before` is the code in `w4_before_triton.py`. Each product is timed alone (a graph of twenty over rotating weights),
then whole layers with their attention, chained in one graph, with either code for each product; then the head of 8-bit
integers. With `--sweep`, other cuts of each product, whose constants are set here alone.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import itertools
import statistics

import torch
import w4_before_triton as before
from gpu_timing import compile_all, distance, graph_us, replay_us

from bough.kernels.decode_attention.work import DecodeWork, plan_decode
from bough.kernels.norm_rope_store.reference import QKNormRope
from bough.kernels.ops import Norm
from bough.kernels.projected_decode.triton import projected_decode
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.kernels.scaled_linear.triton import weight_linear
from bough.kernels.w4_linear import triton as after
from bough.kernels.w4_linear.reference import W4Rows, dequantize, words_of

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
HEADS, KV_HEADS, HEAD_DIM, EPS, GROUP = 32, 8, 128, 1e-5, 128
ROTATION_BYTES = 160 << 20
DEVICE = torch.device("cuda")


def weight(n: int, k: int) -> W4Rows:
    words = torch.randint(-(2**31), 2**31, (n, words_of(k)), device=DEVICE).int()
    scales = (torch.rand(n, k // GROUP, device=DEVICE) * 0.01).half()
    return W4Rows(words, scales, torch.randint(6, 10, (n, k // GROUP), device=DEVICE, dtype=torch.uint8))


def product(code, name: str, x, residual, norm, packed):
    if name == "qkv":
        return code.w4_norm_linear(x, residual, norm, packed)
    if name == "gate_up":
        return code.w4_norm_gate_up(x, residual, norm, packed, "silu")
    return code.w4_linear(x, packed), residual


def given(name: str):
    k = SHAPES[name][1]
    x, residual = torch.randn(2, 1, k, device=DEVICE, dtype=torch.bfloat16)
    return x, residual, Norm(torch.ones(k, device=DEVICE, dtype=torch.bfloat16), EPS, False)


def alone(sweep: bool) -> None:
    for name, (n, k) in SHAPES.items():
        first = weight(n, k)
        nbytes = sum(part.nbytes for part in first)
        copies = [first, *(W4Rows(*(part.clone() for part in first)) for _ in range(ROTATION_BYTES // nbytes))]
        inputs = given(name)

        def us(code, name=name, copies=copies, inputs=inputs) -> float:
            return graph_us(lambda i: product(code, name, *inputs, copies[i % len(copies)]), replays=9)

        exact = inputs[0].double()
        if name in ("o", "down"):
            exact = exact @ dequantize(first, k, torch.float64).T
            offs = [distance(product(code, name, *inputs, first)[0], exact) for code in (before, after)]
        else:
            offs = [distance(product(after, name, *inputs, first)[0], product(before, name, *inputs, first)[0])]
        old, new, again = us(before), us(after), us(before)
        rate = nbytes / new / 1e3
        print(f"{name}: before {old:.2f} ({again:.2f}) us, after {new:.2f} us, {rate:.0f} GB/s, off {offs}", flush=True)
        if sweep:
            other_cuts(name, us, lambda name=name, inputs=inputs, first=first: product(after, name, *inputs, first))


def other_cuts(name: str, us, once) -> None:
    """Both ways of the new code for this product, in other cuts."""
    held = {key: getattr(after, key) for key in dir(after) if key.startswith(("ROWS_", "FEW_", "LONE_"))}
    cuts = []
    for n, warps, units in itertools.product((2, 4, 8), (2, 4), (64, 128)):
        cuts.append({"LONE_TILES": 0, "ROWS_N": n, "ROWS_WARPS": warps, "ROWS_UNITS": units, "FEW_ROWS": 1 << 30})
    if name in ("qkv", "o"):
        for (n, warps), programs in itertools.product(((8, 8), (16, 8), (8, 16), (16, 16), (32, 16)), (132, 264, 396)):
            cuts.append({"LONE_TILES": 9, "LONE_N": n, "LONE_WARPS": warps, "LONE_PROGRAMS": programs})
    cuts = [cut for cut in cuts if cut.get("LONE_TILES") == 0 or fits(name, cut)]
    found = []
    for cut in cuts:
        for key, value in {**held, **cut}.items():
            setattr(after, key, value)
        if all(compile_all([once])):
            found.append((us(after), cut))
    for key, value in held.items():
        setattr(after, key, value)
    for time, cut in sorted(found, key=lambda pair: pair[0])[:6]:
        print(f"    {time:.2f} us {cut}", flush=True)


def fits(name: str, cut: dict[str, int]) -> bool:
    """Whether the registers of a program have room for its weights."""
    tiles = -(-SHAPES[name][0] // (cut["LONE_N"] * cut["LONE_PROGRAMS"]))
    return tiles * cut["LONE_N"] * SHAPES[name][1] // 8 <= 72 * cut["LONE_WARPS"] * 32


class Layers:
    def __init__(self, count: int, keys: int) -> None:
        self.weights = [{name: weight(*shape) for name, shape in SHAPES.items()} for _ in range(count)]
        self.norm = Norm(torch.ones(4096, device=DEVICE, dtype=torch.bfloat16), EPS, False)
        self.caches = torch.randn(count, 2, 1024, KV_HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        angles = torch.rand(1024, HEAD_DIM // 2, device=DEVICE)
        self.turns = QKNormRope(None, None, EPS, False, angles.cos(), angles.sin())
        self.position = torch.tensor([keys - 1], device=DEVICE)
        self.table = torch.arange(1024, device=DEVICE, dtype=torch.int32)[None]
        self.rows = torch.zeros(1, device=DEVICE, dtype=torch.int32)
        self.lengths = torch.tensor([keys], device=DEVICE, dtype=torch.int32)
        self.work = DecodeWork(1, HEADS, KV_HEADS, HEAD_DIM, DEVICE)
        self.start = torch.randn(1, 4096, device=DEVICE, dtype=torch.bfloat16)

    def run(self, codes: dict[str, object]) -> torch.Tensor:
        x, residual = self.start, None
        plan_decode(self.lengths, self.work)
        for own, caches in zip(self.weights, self.caches, strict=True):
            qkv, residual = product(codes["qkv"], "qkv", x, residual, self.norm, own["qkv"])
            attended = projected_decode(
                qkv.view(1, -1, HEAD_DIM), HEADS, KV_HEADS, self.turns, self.position, self.position, *caches,
                self.table, self.rows, self.lengths, self.work, page_size=1, scale=HEAD_DIM**-0.5,
            )  # fmt: skip
            x, _ = product(codes["o"], "o", attended.flatten(1), None, None, own["o"])
            x, residual = product(codes["gate_up"], "gate_up", x, residual, self.norm, own["gate_up"])
            x, _ = product(codes["down"], "down", x, None, None, own["down"])
        return x


def chained(count: int, keys: int) -> None:
    layers, graphs, results = Layers(count, keys), {}, {}
    ways = {"before": (), "all after": tuple(SHAPES), "qkv and o after": ("qkv", "o")}
    ways |= {f"{name} after": (name,) for name in SHAPES}
    for way, names in ways.items():
        codes = {name: after if name in names else before for name in SHAPES}
        layers.run(codes)
        torch.cuda.synchronize()
        graphs[way] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[way]):
            results[way] = layers.run(codes)
    times = {way: [] for way in graphs}
    for _ in range(15):
        for way, graph in graphs.items():
            times[way].append(replay_us(graph.replay))
    first = statistics.median(times["before"])
    for way, taken in times.items():
        us, off = statistics.median(taken), distance(results[way], results["before"])
        print(f"{count} layers, {way}: {us:.1f} us ({us - first:+.1f}), off {off:.4f}", flush=True)


def head() -> None:
    values = torch.randint(-127, 128, (128256, 4096), dtype=torch.int8, device=DEVICE)
    table = QuantizedRows(values, torch.rand(128256, 1, device=DEVICE) * 0.01)
    x = torch.randn(1, 4096, device=DEVICE, dtype=torch.bfloat16)
    exact = x.double() @ (values[:4096].double() * table.scales[:4096].double()).T
    off = distance(weight_linear(x, table, None)[:, :4096], exact)
    us = graph_us(lambda i: weight_linear(x, table, None))
    print(f"head of 8-bit integers: {us:.1f} us (137-140 before), {off=:.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--keys", type=int, default=300)
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    with torch.inference_mode():
        head()
        alone(False)
        chained(args.layers, args.keys)
        if args.sweep:
            alone(True)


if __name__ == "__main__":
    main()
