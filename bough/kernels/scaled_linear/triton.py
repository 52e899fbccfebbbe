"""Scaled products on GPUs: torch's own where a weight has a scale for each output, Triton's where that would leave much
of the device idle, where a weight has a scale for every 128 inputs, and for a few rows that are not quantised."""

from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from bough.kernels.quantize_rows.reference import GROUP, QuantizedRows
from bough.kernels.scaled_linear.device import scaled_by_tiles
from bough.kernels.shared_memory import shared_bytes
from bough.kernels.skinny_linear.triton import skinny_linear

LINES = 8
ENOUGH_PROGRAMS = 96  # a large GPU is reasonably busy with so many
TORCH_TILE = 128  # rows and outputs of a program of torch's product
DEEP_STAGES = 6  # of tiles that are scaled once, at their end


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a result that one program computes, and how."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


CUTS = (Cut(128, 128, 8, 4), Cut(64, 128, 4, 4), Cut(64, 64, 4, 5), Cut(64, 32, 4, 6))


def config_for(m: int, n: int) -> Cut:
    """The largest tile that leaves enough programs."""
    cuts = [cut for cut in CUTS if m > 64 or cut.block_m <= 64]
    enough = (c for c in cuts if triton.cdiv(m, c.block_m) * triton.cdiv(n, c.block_n) >= ENOUGH_PROGRAMS)
    return next(enough, cuts[-1])


def scaled_linear(
    x: QuantizedRows,  # [rows, in]
    weight: QuantizedRows,  # [out, in], in groups as x is
    bias: torch.Tensor | None,  # [out]
    dtype: torch.dtype,  # of the result
    *,
    config: Cut | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`; the sum of each group is scaled before it is added. Without groups, `fits` tells which
    shapes it takes."""
    (m, k), n = x.values.shape, weight.values.shape[0]
    if not weight.group and triton.cdiv(m, TORCH_TILE) * triton.cdiv(n, TORCH_TILE) >= ENOUGH_PROGRAMS:
        # It gives bfloat16, and needs a Hopper GPU or a later one.
        scales = {"scale_a": x.scales, "scale_b": weight.scales.t()}
        # Sums of a few inputs keep 14 bits before they join a float32: far more than the inputs have.
        return torch._scaled_mm(x.values, weight.values.t(), **scales, bias=bias, out_dtype=dtype, use_fast_accum=True)
    out = torch.empty((m, n), dtype=dtype, device=x.values.device)
    cut = config or config_for(m, n)
    described = k % 16 == 0  # lines of whole 16 bytes
    stages = cut.num_stages if weight.group or config else DEEP_STAGES
    stages = min(stages, max(1, shared_bytes() // ((cut.block_m + cut.block_n) * GROUP)))
    sides = [_side(x.values, cut.block_m, described), _side(weight.values, cut.block_n, described)]
    scaled_by_tiles[(triton.cdiv(m, cut.block_m) * triton.cdiv(n, cut.block_n),)](
        sides[0], x.scales, sides[1], weight.scales, bias, out, m, n,
        K=k, GROUPS=weight.scales.shape[1], BLOCK_M=cut.block_m, BLOCK_N=cut.block_n, BLOCK_K=GROUP, LINES=LINES,
        DESCRIBED=described, num_warps=cut.num_warps, num_stages=stages,
    )  # fmt: skip
    return out


def weight_linear(x: torch.Tensor, weight: QuantizedRows, bias: torch.Tensor | None) -> torch.Tensor:
    """The same for at most `FEW_ROWS` rows that are not quantised."""
    return skinny_linear(x, weight.values, bias, scales=weight.scales)


def _side(values: torch.Tensor, block: int, described: bool) -> torch.Tensor | TensorDescriptor:
    if not described:
        return values
    return TensorDescriptor(values, list(values.shape), [values.stride(0), 1], [block, GROUP])
