"""Times products with 4-bit weights on a GPU against those with bfloat16 ones, for the shapes of an 8B model.

    PYTHONPATH=. python tests/kernels/gpu_bench_w4_linear.py [--group 128] [--rows 1,4,16,64,128,512]

Each time is that of one launch in a CUDA graph of twenty over rotating copies of the weight, so that the cache does not
serve it. The last column is the rate at which the 4-bit weight is read. The last line of each number of rows is the sum
over a layer: what decoding gains.
"""

from __future__ import annotations

import argparse

import torch
from gpu_timing import distance, graph_us, table_row

from bough.kernels.triton_ops import linear
from bough.kernels.w4_linear.reference import IntegerRows, dequantize, pack
from bough.kernels.w4_linear.triton import w4_linear

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROTATION_BYTES = 160 << 20  # well beyond the second-level cache
WIDTHS = (5, 8, 9, 9, 7, 10, 8)


def times(m: int, n: int, k: int, group: int) -> tuple[float, float, int, float]:
    """Microseconds with bfloat16 and with 4 bits, bytes of the latter, and how far its product is off."""
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    codes = torch.randint(0, 16, (n, k), device="cuda", dtype=torch.uint8)
    scales = torch.rand(n, k // group, device="cuda") * 0.01
    zeros = torch.randint(0, 16, (n, k // group), device="cuda", dtype=torch.uint8)
    packed = pack(IntegerRows(codes, scales, zeros))
    plain = dequantize(packed, k, torch.bfloat16)
    nbytes = sum(part.nbytes for part in packed)
    copies = [type(packed)(*(part.clone() for part in packed)) for _ in range(ROTATION_BYTES // nbytes + 1)]
    plains = [plain.clone() for _ in range(ROTATION_BYTES // plain.nbytes + 1)]
    off = distance(w4_linear(x, packed), x.double() @ plain.double().T)
    theirs = graph_us(lambda i: linear(x, plains[i % len(plains)], None))
    ours = graph_us(lambda i: w4_linear(x, copies[i % len(copies)], None))
    return theirs, ours, nbytes, off


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--rows", default="1,4,16,64,128,512")
    args = parser.parse_args()
    print(table_row(("rows", "shape", "bf16 us", "w4 us", "gain", "w4 GB/s", "off"), WIDTHS))
    for m in map(int, args.rows.split(",")):
        both = [0.0, 0.0]
        for name, (n, k) in SHAPES.items():
            theirs, ours, nbytes, off = times(m, n, k, args.group)
            both = [both[0] + theirs, both[1] + ours]
            rate = f"{nbytes / ours / 1e3:.0f}"
            cells = (m, name, f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.2f}", rate, f"{off:.4f}")
            print(table_row(cells, WIDTHS))
        cells = (m, "layer", f"{both[0]:.1f}", f"{both[1]:.1f}", f"{both[0] / both[1]:.2f}", "", "")
        print(table_row(cells, WIDTHS))


if __name__ == "__main__":
    main()
