"""The device code of scaled products: what the tiles of linear layers and of experts have in common, and the former."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["m"])
def scaled_by_tiles(
    x, x_scales, weight, scales, bias, out, m, N,
    K: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    LINES: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """One tile of the result. `LINES` row tiles are computed together, so that the columns of the weight that they
    share stay in the cache."""
    columns = tl.cdiv(N, BLOCK_N)
    first = tl.program_id(0) // (LINES * columns) * LINES
    lines = tl.minimum(tl.cdiv(m, BLOCK_M) - first, LINES)
    within = tl.program_id(0) % (LINES * columns)
    row, column = (first + within % lines) * BLOCK_M, within // lines * BLOCK_N
    line, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        rows = tile_of(x, row, start, line < m, K, BLOCK_M, BLOCK_K, DESCRIBED)
        w = tile_of(weight, column, start, n < N, K, BLOCK_N, BLOCK_K, DESCRIBED)
        acc = add_product(acc, rows, w, x_scales, line, line < m, scales, n, n < N, start, GROUPS, False)
    if GROUPS == 1:
        of_weight = factors(scales, n, n < N, 0, GROUPS)
        acc = scaled(acc, factors(x_scales, line, line < m, 0, GROUPS), of_weight, False)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    place = line.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(line < m)[:, None] & (n < N)[None, :])


@triton.jit
def tile_of(
    matrix, first, start, inside,
    K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """A tile of rows from `first` and inputs from `start` on. Through a descriptor, rows that are not `inside` are
    those of the next matrix; nobody reads what comes of them."""
    if DESCRIBED:
        tile = matrix.load([first, start])
    else:
        k = (start + tl.arange(0, BLOCK_K))[None, :]
        rows = (first + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        tile = tl.load(matrix + rows * K + k, mask=inside[:, None] & (k < K), other=0.0)
    return tile


@triton.jit
def add_product(
    acc, rows, w, row_scales, row, there, scales, n, inside, start, GROUPS: tl.constexpr, SWAP: tl.constexpr
):
    """acc + rows @ w.T for inputs from `start` on, or its transpose: tensor cores take 64 rows at least, and the weight
    always has them. With several groups of inputs the sum of one is scaled before it is added."""
    w = w.to(rows.dtype)
    left, right = (w, rows.T) if SWAP else (rows, w.T)
    if GROUPS > 1:
        # Asked for before the product, so that they are there when it is.
        of_rows = factors(row_scales, row, there, start // 128, GROUPS)
        of_weight = factors(scales, n, inside, start // 128, GROUPS)
        acc += scaled(tl.dot(left, right, input_precision="ieee"), of_rows, of_weight, SWAP)
    else:
        acc = tl.dot(left, right, acc, input_precision="ieee")
    return acc


@triton.jit
def factors(scales, row, there, group, GROUPS: tl.constexpr):
    """The scales of some rows in one group; ones for numbers that have no scales."""
    if scales is not None:
        values = tl.load(scales + row.to(tl.int64) * GROUPS + group, mask=there, other=0.0)
    else:
        values = tl.full(row.shape, 1.0, dtype=tl.float32)
    return values


@triton.jit
def scaled(sums, of_rows, of_weight, SWAP: tl.constexpr):
    """The sums of a tile with the scales of both sides."""
    if SWAP:
        sums = sums * of_weight[:, None] * of_rows[None, :]
    else:
        sums = sums * of_weight[None, :] * of_rows[:, None]
    return sums
