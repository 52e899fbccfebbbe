# mypy: disable-error-code="import-untyped"
"""Sampling on GPUs without a sort: launches `triton_kernels` and `triton_filters`, owns no state.

Two launches serve greedy and unfiltered rows, a third is added when some row may have a filter. Grids depend on shapes
alone and nothing is read back, so every launch can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from bough.kernels.sampling.rows import MAX_VOCAB_SIZE, RowParameters
from bough.kernels.sampling.triton_filters import gather_kernel
from bough.kernels.sampling.triton_kernels import pick_kernel, scan_kernel

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
    tokens: Tensor | None = None,  # [n] int64, written
    bad: Tensor | None = None,  # [n] bool, written
    config: SamplingConfig | None = None,
    batch: int = 0,  # lines stand in columns of so many rows: the second is one output position further, and so on
) -> tuple[Tensor, Tensor]:
    """One token per row, and which rows had none because of NaN, +inf or nothing but -inf; those get token 0.

    `filtered` promises that some row may have a filter; without it none is applied. Each row's `generated` grows by
    one, unless lines stand in columns: the caller counts those that hold. Returns (tokens, bad).
    """
    n, vocab_size = logits.shape
    if vocab_size > MAX_VOCAB_SIZE or logits.stride(1) != 1:
        raise ValueError(f"logits must be contiguous rows of at most {MAX_VOCAB_SIZE} tokens, not {logits.shape}")
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device) if tokens is None else tokens
    bad = torch.empty(n, dtype=torch.bool, device=logits.device) if bad is None else bad
    if n:
        _Step(logits, rows, parameters, config or config_for(n, vocab_size)).launch(filtered, tokens, bad, batch)
    return tokens, bad


class _Step:
    """The launches of one step and the scratch memory between them."""

    def __init__(self, logits: Tensor, rows: Tensor, parameters: RowParameters, config: SamplingConfig) -> None:
        self._n, self._vocab_size = logits.shape
        self._input = (logits, logits.stride(0), rows, parameters.random, parameters.temperature)
        self._filters = (parameters.top_k, parameters.top_p, parameters.min_p)
        self._draws = (parameters.seed, parameters.generated)
        self._config = config
        self._shift = UNUSED_BITS[logits.dtype]
        self._tiles = triton.cdiv(self._vocab_size, config.tile)
        self._groups = triton.cdiv(self._vocab_size, config.group)
        self._tile_stats = (self._scratch(torch.float32, self._tiles), self._scratch(torch.float32, self._tiles))

    def launch(self, filtered: bool, tokens: Tensor, bad: Tensor, batch: int) -> None:
        self._scan()
        # Without filters the last kernel is compiled without the parts that would read these.
        gathered = self._gather() if filtered else (tokens, tokens, self._input[0], tokens)
        self._pick(filtered, gathered, tokens, bad, batch)

    def _scratch(self, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((self._n, *shape), dtype=dtype, device=self._input[0].device)

    def _scan(self) -> None:
        config = self._config
        loads = triton.cdiv(self._tiles, config.scan_tiles)
        steps = triton.cdiv(loads, config.scan_programs)
        scan_kernel[self._n, triton.cdiv(loads, steps)](
            *self._input, *self._tile_stats, self._vocab_size, self._tiles, steps,
            STEP=config.scan_tiles, TILE=config.tile,
            num_warps=config.scan_warps,
        )  # fmt: skip

    def _gather(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        config, groups = self._config, self._groups
        steps = triton.cdiv(groups, config.gather_programs)
        gathered = (
            self._scratch(torch.int32),
            self._scratch(torch.int32, groups),
            self._scratch(self._input[0].dtype, groups, config.segment),
            self._scratch(torch.int32, groups, config.segment),
        )
        gather_kernel[self._n, triton.cdiv(groups, steps)](
            *self._input, *self._filters, *self._tile_stats, *gathered, self._vocab_size, self._tiles, groups, steps,
            SHIFT=self._shift, TILES=triton.next_power_of_2(self._tiles), TILE=config.tile, GROUP=config.group,
            SEGMENT=config.segment,
            num_warps=config.gather_warps,
        )  # fmt: skip
        return gathered

    def _pick(
        self, filtered: bool, gathered: tuple[Tensor, Tensor, Tensor, Tensor], tokens: Tensor, bad: Tensor, batch: int
    ) -> None:
        config = self._config
        pick_kernel[self._n,](
            *self._input, *self._filters, *self._draws, *self._tile_stats, *gathered, tokens, bad, self._vocab_size,
            self._tiles, self._groups, batch,
            FILTERED=filtered, SHIFT=self._shift, TILES=triton.next_power_of_2(self._tiles), TILE=config.tile,
            GROUPS=triton.next_power_of_2(self._groups), SEGMENT=config.segment, BLOCK=config.block,
            num_warps=config.pick_warps,
        )  # fmt: skip
