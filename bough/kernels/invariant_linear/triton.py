# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
"""Products of any number of rows in Triton; a row's bits depend on the row and the weight alone (see `tiling`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from bough.kernels.invariant_linear.tiling import LinearConfig, config_for, fitted
from bough.kernels.shared_memory import shared_bytes

GROUP_M = 8  # row tiles that are computed together, so that the columns of the weight they share stay in the cache
SUM_WIDTH = 1024


def invariant_linear(
    x: torch.Tensor,  # [rows, inputs], contiguous, lines a multiple of 16 bytes
    weight: torch.Tensor,  # [outputs, inputs], likewise
    bias: torch.Tensor | None = None,  # [outputs]
    *,
    out_dtype: torch.dtype | None = None,  # that of x when left out
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias, accumulated in float32. [rows, outputs]"""
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty((m, n), dtype=out_dtype or x.dtype, device=x.device)
    if m == 0:
        return out
    chosen = config or fitted(config_for(m, n, k, x.dtype.itemsize), x.dtype.itemsize, shared_bytes())
    tile, pieces = chosen.tile, triton.cdiv(k, chosen.piece)
    split = chosen.parallel and pieces > 1
    target = torch.empty((pieces, m, n), dtype=torch.float32, device=x.device) if split else out
    _multiply[(triton.cdiv(m, tile.block_m) * triton.cdiv(n, tile.block_n), pieces if split else 1)](
        TensorDescriptor(x, [m, k], [x.stride(0), 1], [tile.block_m, tile.block_k]),
        TensorDescriptor(weight, [n, k], [weight.stride(0), 1], [tile.block_n, tile.block_k]), None if split else bias,
        target, m, n, k, chosen.piece, pieces,
        SINGLE=split or pieces == 1, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP=GROUP_M,
        PRECISION="ieee",  # says something of float32 alone; most AMD devices refuse any other
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if split:
        _add_pieces[(m, triton.cdiv(n, SUM_WIDTH))](target, bias, out, m, n, pieces, BLOCK=SUM_WIDTH)
    return out


# Shapes are no constants here: an engine has a dozen of them, and compiles each tile but once.
@triton.jit(do_not_specialize=["m", "pieces"])
def _multiply(
    x, weight, bias,
    out,  # [m, n], or [pieces, m, n] where each piece has programs of its own
    m: int, n: int, k: int,
    piece: int,  # inputs
    pieces: int,
    SINGLE: tl.constexpr,  # a program has one piece only
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of the result, of all pieces or of one."""
    tile = tl.program_id(0)
    columns = tl.cdiv(n, BLOCK_N)
    first = tile // (GROUP * columns) * GROUP
    lines = tl.minimum(tl.cdiv(m, BLOCK_M) - first, GROUP)
    within = tile % (GROUP * columns)
    row, column = (first + within % lines) * BLOCK_M, within // lines * BLOCK_N

    own = tl.program_id(1)
    if SINGLE:
        first_k = own * piece
        last_k = tl.minimum(first_k + piece, k)
        total = _sum_piece(x, weight, row, column, first_k, last_k, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for number in range(pieces):
            first_k = number * piece
            last_k = tl.minimum(first_k + piece, k)
            total += _sum_piece(x, weight, row, column, first_k, last_k, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)

    line, at = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    if bias is not None:
        total += tl.load(bias + at, mask=at < n, other=0.0).to(tl.float32)[None, :]
    place = (own.to(tl.int64) * m + line)[:, None] * n + at[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=(line < m)[:, None] & (at < n)[None, :])


@triton.jit
def _sum_piece(
    x, weight, row, column, first_k, last_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The product over the inputs of one piece. Beyond the edges a descriptor reads zeros, which change no sum."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(first_k, last_k, BLOCK_K):
        acc = tl.dot(x.load([row, k]), weight.load([column, k]).T, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["m", "pieces"])
def _add_pieces(
    parts,  # [pieces, m, n] float32
    bias,
    out,  # [m, n]
    m: int, n: int, pieces: int,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds pieces in the order in which `_multiply` does when it goes through all of them."""
    line = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for number in range(pieces):
        total += tl.load(parts + (number * m + line) * n + at, mask=at < n, other=0.0)
    if bias is not None:
        total += tl.load(bias + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out + line * n + at, total.to(out.dtype.element_ty), mask=at < n)
