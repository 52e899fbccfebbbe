"""Times and checks kernels of recurrent layers on a GPU: `PYTHONPATH=. python tests/kernels/gpu_bench_recurrence.py`.

At the widths of Qwen3-Next (delta rule), Kimi Linear (a rate for each channel) and Granite 4 (Mamba 2), in bfloat16.
Each time is that of one call in a captured graph of many; TB/s counts the states once read and once written. The
distance is that from torch's implementation in float32, of the result and of the state, for one row of 512 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bough.kernels.recurrence import reference
from bough.kernels.recurrence import triton as conv
from bough.kernels.recurrence.reference import StateRows
from bough.kernels.recurrence.triton import recurrence_
from tests.kernels.gpu_timing import distance, graph_us


@dataclass(frozen=True)
class Kind:
    name: str
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    delta: bool = True
    by_channel: bool = False


KINDS = (
    Kind("Qwen3-Next", 32, 16, 128, 128),
    Kind("Kimi Linear", 32, 32, 128, 128, by_channel=True),
    Kind("Granite 4", 128, 1, 128, 64, delta=False),
)


def rows_of(lengths: list[int]) -> StateRows:
    rows = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    several = any(length > 1 for length in lengths)
    return StateRows(rows[:, None] + 1, rows, starts, torch.from_numpy(starts).cuda() if several else None)


def inputs(kind: Kind, tokens: int) -> list[Any]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, device="cuda", dtype=torch.bfloat16)

    q, k = (draw(kind.key_heads, kind.key_dim) * kind.key_dim**-0.5 for _ in range(2))
    rates = (kind.heads, kind.key_dim) if kind.by_channel else (kind.heads,)
    beta = draw(kind.heads).sigmoid() if kind.delta else None
    return [q, k, draw(kind.heads, kind.value_dim), -torch.nn.functional.softplus(draw(*rates).float()), beta]


def states(kind: Kind, rows: int) -> torch.Tensor:
    return torch.randn(rows + 1, kind.heads, kind.key_dim, kind.value_dim, device="cuda")


def main() -> None:
    for kind in KINDS:
        print(kind.name)
        given, start, rows = inputs(kind, 512), states(kind, 1), rows_of([512])
        ours, theirs = start.clone(), start.clone()
        found = recurrence_(*given, ours, rows)
        expected = reference.recurrence_(*(None if x is None else x.float() for x in given), theirs, rows)
        print(f"  away from torch: result {distance(found, expected):.1e}, state {distance(ours, theirs):.1e}")
        for lengths in ([1], [1] * 16, [1] * 128, [2048], [8192], [512] * 16, [1] * 64 + [2048]):
            held, step, parts = states(kind, len(lengths)), rows_of(lengths), inputs(kind, sum(lengths))
            x = torch.randn(sum(lengths), 8192, device="cuda", dtype=torch.bfloat16)
            tails, weight = torch.zeros(len(lengths) + 1, 3, 8192, device="cuda"), x[0, :, None].repeat(1, 4)
            us = graph_us(lambda i, p=parts, h=held, s=step: recurrence_(*p, h, s))
            of_conv = graph_us(lambda i, x=x, w=weight, t=tails, s=step: conv.causal_conv_(x, w, None, t, s))
            rate = 2 * held[1:].nbytes / us / 1e6
            print(
                f"  {len(lengths):4} rows, {sum(lengths):5} tokens: recurrence {us:8.1f} us ({rate:.2f} TB/s), ", end=""
            )
            print(f"convolution of 8192 channels {of_conv:7.1f} us", flush=True)


if __name__ == "__main__":
    main()
