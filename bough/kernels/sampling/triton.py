"""Sampling on GPUs without a sort: launches the kernels of `device`, owns no state.

Two launches serve greedy and unfiltered rows, a third is added when some row may have a filter. Grids depend on shapes
alone and nothing is read back, so every launch can be captured in a CUDA graph.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from bough.kernels.sampling.device import gather_kernel, pick_kernel, scan_kernel
from bough.kernels.sampling.rows import MAX_VOCAB_SIZE, RowParameters

if torch.version.hip is not None:
    # Triton 3.6's pass that turns loads into AMD's buffer loads fails on those in the search for thresholds.
    triton.knobs.amd.use_buffer_ops = False

UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # of a float32 that holds such a logit


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """Sizes are powers of two. All but the two `programs` decide the order of sums: keep them the same for all n."""

    tile: int = 512  # logits that share one best logit and one sum
    scan_tiles: int = 4  # tiles read at once
    scan_warps: int = 4
    scan_programs: int = 1  # that share a row's tiles
    group: int = 4096  # logits whose candidates share a segment
    segment: int = 256  # candidates of a group that fit
    gather_warps: int = 8
    gather_programs: int = 1  # that share a row's groups
    block: int = 4096  # candidates read at once
    pick_warps: int = 8


def config_for(n: int, vocab_size: int) -> SamplingConfig:
    """Enough programs for every multiprocessor, and as few as that allows: each repeats a little work per row."""
    programs = -(-1024 // max(n, 1))
    return SamplingConfig(
        scan_programs=min(max(programs, 8), triton.cdiv(vocab_size, 2048)),
        gather_programs=min(programs, triton.cdiv(vocab_size, 4096)),
    )


def sample_rows(
    logits: Tensor,  # [n, V] float32, bfloat16 or float16, contiguous in each row
    rows: Tensor,  # [n] int64, row numbers
    parameters: RowParameters,
    filtered: bool,
    config: SamplingConfig | None = None,
    batch: int = 0,  # lines stand in columns of so many rows: the second is one output position further, and so on
) -> tuple[Tensor, Tensor]:
    """One token per row [n] int64, and which rows [n] had none because of NaN, +inf or nothing but -inf; those get
    token 0.

    `filtered` promises that some row may have a filter; without it none is applied. Each row's `generated` grows by
    one, unless lines stand in columns: the caller counts those that hold. Returns (tokens, bad).
    """
    n, vocab_size = logits.shape
    if vocab_size > MAX_VOCAB_SIZE or logits.stride(1) != 1:
        raise ValueError(f"logits must be contiguous rows of at most {MAX_VOCAB_SIZE} tokens, not {logits.shape}")

    def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((n, *shape), dtype=dtype, device=logits.device)

    tokens, bad = scratch(torch.int64), scratch(torch.bool)
    if not n:
        return tokens, bad
    chosen, given = config or config_for(n, vocab_size), parameters
    tiles, groups = triton.cdiv(vocab_size, chosen.tile), triton.cdiv(vocab_size, chosen.group)
    read = (logits, logits.stride(0), rows, given.random, given.temperature)
    filters, stats = (
        (given.top_k, given.top_p, given.min_p),
        (scratch(torch.float32, tiles), scratch(torch.float32, tiles)),
    )
    loads = triton.cdiv(tiles, chosen.scan_tiles)
    steps = triton.cdiv(loads, chosen.scan_programs)
    scan_kernel[n, triton.cdiv(loads, steps)](
        *read, *stats, vocab_size, tiles, steps, STEP=chosen.scan_tiles, TILE=chosen.tile, num_warps=chosen.scan_warps
    )
    common = {"SHIFT": UNUSED_BITS[logits.dtype], "TILES": triton.next_power_of_2(tiles), "TILE": chosen.tile}
    common["SEGMENT"] = chosen.segment
    # Without filters the last kernel is compiled without the parts that would read these.
    gathered = (tokens, tokens, logits, tokens)
    if filtered:
        segments, steps = (groups, chosen.segment), triton.cdiv(groups, chosen.gather_programs)
        counted = (scratch(torch.int32), scratch(torch.int32, groups))
        gathered = (*counted, scratch(logits.dtype, *segments), scratch(torch.int32, *segments))
        gather_kernel[n, triton.cdiv(groups, steps)](
            *read, *filters, *stats, *gathered, vocab_size, tiles, groups, steps,
            GROUP=chosen.group, **common, num_warps=chosen.gather_warps,
        )  # fmt: skip
    pick_kernel[n,](
        *read, *filters, given.seed, given.generated, *stats, *gathered, tokens, bad, vocab_size, tiles, groups, batch,
        FILTERED=filtered, GROUPS=triton.next_power_of_2(groups), BLOCK=chosen.block, **common,
        num_warps=chosen.pick_warps,
    )  # fmt: skip
    return tokens, bad
