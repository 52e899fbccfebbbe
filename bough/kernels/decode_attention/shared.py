"""Tree attention: a prefix that several decodes share is read once for all of them.

Decodes stand in the order of the radix tree. `shared_runs` finds, at every depth, the neighbours that share a range of
keys which is worth reading together; `plan_shared` cuts these runs into items, small enough for a program: some rows,
and a part of their keys. A program attends for the queries of all its rows, as lines of one matrix, and leaves for each
row a part of its result. The keys behind its last run every row reads by itself (`triton.decode_attention`), which then
weighs all parts.

The plan is made on the host when rows come or go, and lies in persistent buffers, so that a captured graph reads it.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from bough.core.plan import IntArray
from bough.kernels.decode_attention.device import attend_over
from bough.kernels.overlap import overlap, take_turn

MIN_DOT = 16  # the smallest matrix that tl.dot takes
LINES = 64  # of a program's matrix of queries: as many as the widest instructions take
KEY_STEP = 128  # parts are a multiple of it
PART_KEYS = 64  # storing and weighing a row's part takes as long as reading so many keys
# Keys times kv heads that a step must not read again to be worth a launch more in every layer: of 128 columns they take
# about 20 microseconds on a large GPU.
MIN_SAVED = 1 << 18
ITEM_FIELDS = 5  # first place in the batch, rows, first key, end of keys, which of its rows' parts
MAX_ITEMS = 256
PARTS_PER_ROW = 4  # at most, on average
PROGRAMS = 2 * 132  # that fill a large GPU


class Run(NamedTuple):
    """Neighbours in the batch, and keys that they share."""

    place: int
    rows: int
    first: int
    end: int


def shared_runs(common: IntArray, rows_at_once: int) -> Iterator[Run]:
    """What rows should read together that have so many first keys in common with the one before them. [batch] The
    runs of a row follow on each other, from its first key on."""
    stack = [(0, len(common), 0)]  # neighbours, and the keys that they have read together already
    while stack:
        begin, end, base = stack.pop()
        if end - begin < 2:
            continue
        least = int(common[begin + 1 : end].min())
        saved = (end - begin - -(-(end - begin) // rows_at_once)) * (least - base) - (end - begin) * PART_KEYS
        if saved > 0:
            yield Run(begin, end - begin, base, least)
            base = least
        cuts = [begin, *(begin + 1 + np.flatnonzero(common[begin + 1 : end] == least)).tolist(), end]
        stack += [(first, last, base) for first, last in pairwise(cuts)]


class SharedPlan(NamedTuple):
    items: IntArray  # [n, ITEM_FIELDS]
    part_starts: IntArray  # [batch + 1] where the parts of each row begin
    own_first: IntArray  # [batch] the first key that each row reads by itself


def plan_shared(common: IntArray, rows_at_once: int, kv_heads: int, max_parts: int) -> SharedPlan | None:
    """None: nothing is worth reading together."""
    runs = sorted(shared_runs(common, rows_at_once), key=lambda run: run.first)
    tiles = [-(-run.rows // rows_at_once) for run in runs]
    saved = sum((run.rows - n) * (run.end - run.first) for run, n in zip(runs, tiles, strict=True))
    if saved * kv_heads < MIN_SAVED:
        return None
    keys = sum(n * (run.end - run.first) for run, n in zip(runs, tiles, strict=True))
    chunk = -(-keys * kv_heads // PROGRAMS // KEY_STEP) * KEY_STEP or KEY_STEP
    while True:
        counts = [-(-(run.end - run.first) // chunk) for run in runs]
        parts = sum(run.rows * n for run, n in zip(runs, counts, strict=True))
        if parts <= max_parts and sum(n * m for n, m in zip(counts, tiles, strict=True)) <= MAX_ITEMS:
            break
        if max(counts) == 1:
            return None
        chunk *= 2
    items, before, own = [], np.zeros(len(common), dtype=np.int32), np.zeros(len(common), dtype=np.int32)
    for run, count in zip(runs, counts, strict=True):
        size = -(-(run.end - run.first) // count)
        for part in range(count):
            first = run.first + part * size
            items += [
                (place, min(rows_at_once, run.place + run.rows - place), first, min(first + size, run.end), part + at)
                for at in (int(before[run.place]),)
                for place in range(run.place, run.place + run.rows, rows_at_once)
            ]
        before[run.place : run.place + run.rows] += count
        own[run.place : run.place + run.rows] = run.end
    return SharedPlan(np.array(items, dtype=np.int32), np.concatenate([[0], before.cumsum()]).astype(np.int32), own)


class SharedWork:
    """Owns the plan on the device, and the parts of results, for batches of at most `max_batch` rows."""

    def __init__(self, max_batch: int, heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
        self._kv_heads = kv_heads
        self.rows_at_once = max(1, LINES // (heads // kv_heads))
        self._max_batch, self._max_parts = max_batch, PARTS_PER_ROW * max_batch
        self._plan: tuple[bytes, IntArray | None] = (b"", None)
        buffer = torch.zeros(1 + MAX_ITEMS * ITEM_FIELDS + 2 * max_batch + 1, dtype=torch.int32, device=device)
        self.buffer = buffer
        self.items, rest = buffer[: 1 + MAX_ITEMS * ITEM_FIELDS], buffer[1 + MAX_ITEMS * ITEM_FIELDS :]  # their number
        self.part_starts, self.own_first = rest[: max_batch + 1], rest[max_batch + 1 :]
        self.partial = torch.empty((self._max_parts, heads, head_dim), dtype=torch.float32, device=device)
        self.log_sums = torch.empty((self._max_parts, heads), dtype=torch.float32, device=device)

    def plan(self, common: IntArray | None) -> tuple[IntArray | None, bool]:
        """What `buffer` must hold for such a batch, None where nothing is worth reading together; and whether it is
        another than for the last one."""
        key = b"" if common is None else common.tobytes()
        if key == self._plan[0]:
            return self._plan[1], False
        packed = None
        if common is not None and (planned := plan_shared(common, self.rows_at_once, self._kv_heads, self._max_parts)):
            packed = np.zeros(self.buffer.shape, dtype=np.int32)
            packed[0], fields = len(planned.items), planned.items.reshape(-1)
            packed[1 : 1 + len(fields)] = fields
            starts, own = packed[1 + MAX_ITEMS * ITEM_FIELDS :][: self._max_batch + 1], packed[-self._max_batch :]
            starts[: len(planned.part_starts)] = planned.part_starts
            starts[len(planned.part_starts) :] = planned.part_starts[-1]
            own[: len(planned.own_first)] = planned.own_first
        self._plan = key, packed
        return packed, packed is not None

    def clear(self) -> None:
        """Nothing is read together, whatever was planned."""
        self.buffer.zero_()
        self._plan = b"", None

    @staticmethod
    def held_bytes(max_batch: int, heads: int, head_dim: int) -> int:
        return PARTS_PER_ROW * max_batch * heads * (head_dim + 1) * 4


def attend_shared(
    q: torch.Tensor,  # [batch, heads, head_dim], the last dimension contiguous
    k_cache: torch.Tensor,  # [slots, kv_heads, head_dim]
    v_cache: torch.Tensor,  # of latents the first columns of k_cache
    page_table: torch.Tensor,
    rows: torch.Tensor,
    work: SharedWork,
    *,
    kv_heads: int,  # of latents, blocks of heads
    page_size: int,
    scale: float,  # in units of log2, as `softcap`
    softcap: float | None,
    block_n: int,
    num_warps: int,
    num_stages: int,
) -> None:
    """Leaves the parts of all rows' results in `work`, in units of the stored values."""
    batch, heads, head_dim = *q.shape[:2], v_cache.shape[2]
    extra = q.shape[2] - head_dim
    _attend_shared[(kv_heads, MAX_ITEMS)](
        q, k_cache, v_cache, page_table, rows, work.items, work.part_starts, work.partial, work.log_sums,
        q.stride(0), q.stride(1), page_table.stride(0), scale, 0.0 if softcap is None else softcap,
        HAS_SOFTCAP=softcap is not None, KV_HEADS=kv_heads, GROUP=heads // kv_heads, HEAD_DIM=head_dim, EXTRA=extra,
        PAGE_SIZE=page_size, FIELDS=ITEM_FIELDS, BLOCK_M=max(LINES, triton.next_power_of_2(heads // kv_heads)),
        BLOCK_D=triton.next_power_of_2(head_dim), BLOCK_E=max(MIN_DOT, triton.next_power_of_2(extra)), BLOCK_N=block_n,
        num_warps=num_warps, num_stages=num_stages, **overlap(batch),
    )  # fmt: skip


@triton.jit
def _attend_shared(
    q, k_cache, v_cache, page_table, rows, items, part_starts, partial, log_sums,
    q_row_stride: int, q_head_stride: int, table_stride: int, scale: float, softcap: float,
    HAS_SOFTCAP: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    EXTRA: tl.constexpr, PAGE_SIZE: tl.constexpr, FIELDS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One item for the query heads of one kv head."""
    take_turn(OVERLAP)
    kv_head, item = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(items):
        return
    fields = items + 1 + item * FIELDS
    place, members = tl.load(fields), tl.load(fields + 1)
    first, last, part = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4)
    pages = page_table + tl.load(rows + place).to(tl.int64) * table_stride

    line, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    member, head = line // GROUP, kv_head * GROUP + line % GROUP
    there = member < members
    valid = there[:, None] & (d < HEAD_DIM)[None, :]
    own: tl.constexpr = q.dtype.element_ty
    narrow: tl.constexpr = k_cache.dtype.element_ty.primitive_bitwidth == 8 and own.primitive_bitwidth == 16
    kind: tl.constexpr = tl.float16 if narrow else own
    query_lines = q + (place + member).to(tl.int64)[:, None] * q_row_stride + head[:, None] * q_head_stride
    queries = tl.load(query_lines + d[None, :], mask=valid, other=0.0).to(kind)
    more_queries = queries
    if EXTRA:
        e = HEAD_DIM + tl.arange(0, BLOCK_E)
        more_valid = there[:, None] & (e < HEAD_DIM + EXTRA)[None, :]
        more_queries = tl.load(query_lines + e[None, :], mask=more_valid, other=0.0).to(kind)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top, norm, acc = attend_over(
        queries, more_queries, k_cache, v_cache, pages, first, last, kv_head, top, norm, acc, scale, softcap,
        HAS_SOFTCAP, KV_HEADS, HEAD_DIM, EXTRA, PAGE_SIZE, BLOCK_D, BLOCK_E, BLOCK_N,
    )  # fmt: skip
    begin = tl.load(part_starts + place + member, mask=there, other=0)
    result = (begin + part).to(tl.int64) * (KV_HEADS * GROUP) + head
    tl.store(partial + result[:, None] * HEAD_DIM + d[None, :], acc / norm[:, None], mask=valid)
    tl.store(log_sums + result, top + tl.log2(norm), mask=there)
