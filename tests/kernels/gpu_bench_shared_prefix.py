"""Times decode attention over shared prefixes on a GPU, read together and row by row, in one run:
`PYTHONPATH=. python tests/kernels/gpu_bench_shared_prefix.py [--json]`.

256 rows in groups that share a prefix, with 64 keys of their own. Row by row, the rows of a group are neighbours, so
the device's cache serves repeated reads. Each time is of one layer in a captured graph, over several pools in turn.
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch

from bough.kernels.decode_attention import shared as kernels
from bough.kernels.decode_attention.shared import SharedWork
from bough.kernels.decode_attention.triton import decode_attention
from bough.kernels.decode_attention.work import DecodeWork, plan_decode
from tests.kernels.gpu_bench_decode_attention import HEAD_DIM, KV_HEADS, SCALE
from tests.kernels.gpu_timing import distance, graph_us

POOLS, OWN, BATCH = 4, 64, 256
MOST_TOKENS = 3 << 20  # of all rows, were nothing shared


def measure(heads: int, degree: int, prefix: int) -> dict[str, float]:
    batch = max(degree, min(BATCH, MOST_TOKENS // (prefix + OWN) // degree * degree))
    lengths = torch.full((batch,), prefix + OWN, dtype=torch.int32, device="cuda")
    width = prefix + OWN
    pages = torch.arange(batch * OWN, device="cuda", dtype=torch.int32).view(batch, OWN) + 1
    common = torch.arange(batch // degree * prefix, device="cuda", dtype=torch.int32).view(-1, prefix) + batch * OWN + 1
    table = torch.cat([common.repeat_interleave(degree, dim=0), pages], dim=1)
    slots = batch * OWN + batch // degree * prefix + 1
    half = {"device": "cuda", "dtype": torch.bfloat16}
    pools = [torch.randn((2, slots, KV_HEADS, HEAD_DIM), **half) for _ in range(POOLS)]
    q = torch.randn((batch, heads, HEAD_DIM), **half)
    rows = torch.arange(batch, dtype=torch.int32, device="cuda")
    neighbours = np.full(batch, prefix, dtype=np.int32)
    neighbours[::degree] = 0
    works = [DecodeWork(batch, heads, KV_HEADS, HEAD_DIM, q.device) for _ in range(2)]
    together = SharedWork(batch, heads, KV_HEADS, HEAD_DIM, q.device)
    packed, _ = together.plan(neighbours)
    plan_decode(lengths, works[0])

    def attend(number: int, shared: SharedWork | None) -> torch.Tensor:
        keys, values = pools[number % POOLS]
        options = {"page_size": 1, "scale": SCALE, "shared": shared}
        return decode_attention(q, keys, values, table, rows, lengths, works[shared is not None], **options)  # type: ignore[arg-type]

    assert table.shape[1] == width
    alone = graph_us(lambda number: attend(number, None))
    found = {"heads": heads, "degree": degree, "prefix": prefix, "rows": batch, "row by row us": alone}
    if packed is None:
        return {**found, "together us": alone, "ratio": 1.0}
    together.buffer.copy_(torch.from_numpy(packed))
    plan_decode(lengths, works[1], together.own_first)
    far = distance(attend(0, together), attend(0, None))
    assert far < 1e-2, far
    fast = graph_us(lambda number: attend(number, together))
    return {**found, "items": int(packed[0]), "together us": fast, "ratio": alone / fast}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--degree", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--prefix", type=int, nargs="+", default=[128, 512, 1024, 4096, 16384])
    parser.add_argument("--programs", type=int, default=kernels.PROGRAMS)
    args = parser.parse_args()
    kernels.PROGRAMS = args.programs
    for heads in args.heads:
        for degree in args.degree:
            for prefix in args.prefix:
                found = measure(heads, degree, prefix)
                torch.cuda.empty_cache()
                print(
                    json.dumps(found) if args.json else "  ".join(f"{k} {v:.5g}" for k, v in found.items()), flush=True
                )


if __name__ == "__main__":
    main()
