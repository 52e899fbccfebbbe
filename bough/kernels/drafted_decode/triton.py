# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
"""Decodes of several tokens each, which a captured graph can begin and end with.

A step has `width` columns of one token of each row, back to back: each column is a decode of its own. The host sends a
line for each row; what it cannot know yet, how long the row is and how many tokens its last step gave, it leaves to the
device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Of a row's line: its number, how many tokens it computes, its length and the tokens of its last step (negative: as the
# device knows them), and how many of the drafts, which follow, its last step may have given already.
FIELDS = 5
BLOCK = 64


def drafted_inputs_(
    lines: torch.Tensor,  # [batch, FIELDS + drafts] int32
    lengths: torch.Tensor,  # [rows] int32
    counts: torch.Tensor,  # [rows] int32
    last_tokens: torch.Tensor,  # [rows] int64
    page_tables: torch.Tensor,  # [groups, rows, pages] int32
    columns: torch.Tensor,  # [2, width * batch] int32, written: rows and lengths
    places: torch.Tensor,  # [2 + groups, width * batch] int64, written: tokens, positions and slots
    page_size: int,
) -> None:
    """What each row computes. In columns that a row has no token for, the last row stands: it is padding."""
    batch = len(lines)
    _inputs[(triton.cdiv(batch, BLOCK), columns.shape[1] // batch)](
        lines, lengths, counts, last_tokens, page_tables, columns, places, batch, lines.stride(0), columns.stride(0),
        places.stride(0), page_tables.stride(0), page_tables.stride(1), len(lengths) - 1,
        FIELDS=FIELDS, GROUPS=len(page_tables), PAGE_SIZE=page_size, BLOCK=BLOCK,
    )  # fmt: skip


def count_held_(
    lines: torch.Tensor,  # as above
    lengths: torch.Tensor,
    counts: torch.Tensor,
    last_tokens: torch.Tensor,
    generated: torch.Tensor,  # [rows] int64
    drafts: torch.Tensor,  # [width * batch] int64: the tokens that were computed
    tokens: torch.Tensor,  # [width * batch] int64: those that were sampled behind them
    bad: torch.Tensor,  # [width * batch] bool
    result: torch.Tensor,  # [(width + 1) * batch] int64, written: the tokens, -1: bad; then how many hold
    ends: torch.Tensor,  # [batch] int64, written: the last place that holds
) -> None:
    """Drafts hold while they are what was sampled; moves the rows on."""
    batch = len(lines)
    _count_held[(triton.cdiv(batch, BLOCK),)](
        lines, lengths, counts, last_tokens, generated, drafts, tokens, bad, result, ends, batch,
        len(tokens) // batch, lines.stride(0),
        FIELDS=FIELDS, BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _length(line, row, lengths, mask):
    sent = tl.load(line + 2, mask=mask, other=0)
    return tl.where(sent < 0, tl.load(lengths + row, mask=mask, other=0), sent)


@triton.jit(do_not_specialize=["batch", "scratch"])
def _inputs(
    lines, lengths, counts, last_tokens, page_tables, columns, places,
    batch: int, line_stride: int, column_stride: int, place_stride: int, table_stride: int, row_stride: int,
    scratch: int,
    FIELDS: tl.constexpr, GROUPS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    mask = place < batch
    line = lines + place * line_stride
    own = tl.load(line, mask=mask, other=0).to(tl.int64)
    live = mask & (column < tl.load(line + 1, mask=mask, other=0))
    position = tl.where(live, _length(line, own, lengths, mask) + column, 0)
    row = tl.where(live, own, scratch)
    count = tl.load(line + 3, mask=mask, other=0)
    count = tl.where(count < 0, tl.load(counts + own, mask=mask, other=0), count)
    passed = tl.maximum(tl.minimum(count - 1, tl.load(line + 4, mask=mask, other=0)), 0)
    first = tl.load(last_tokens + row, mask=mask & (column == 0), other=0)
    draft = tl.load(line + FIELDS + passed + column - 1, mask=live & (column > 0), other=0)
    at = column * batch + place
    tl.store(columns + at, row.to(tl.int32), mask=mask)
    tl.store(columns + column_stride + at, position + 1, mask=mask)
    tl.store(places + at, tl.where(column == 0, first, draft.to(tl.int64)), mask=mask)
    tl.store(places + place_stride + at, position.to(tl.int64), mask=mask)
    for group in tl.static_range(GROUPS):
        entry = page_tables + group * table_stride + row * row_stride + position // PAGE_SIZE
        page = tl.load(entry, mask=mask, other=0).to(tl.int64)
        tl.store(places + (2 + group) * place_stride + at, page * PAGE_SIZE + position % PAGE_SIZE, mask=mask)


@triton.jit(do_not_specialize=["batch", "width"])
def _count_held(
    lines, lengths, counts, last_tokens, generated, drafts, tokens, bad, result, ends,
    batch: int, width: int, line_stride: int,
    FIELDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < batch
    line = lines + place * line_stride
    row = tl.load(line, mask=mask, other=0).to(tl.int64)
    most = tl.load(line + 1, mask=mask, other=0)
    length = _length(line, row, lengths, mask)
    held, last, alive = place * 0, tl.load(tokens + place, mask=mask, other=0), mask
    for column in range(width):
        at = column * batch + place
        token = tl.load(tokens + at, mask=mask, other=0)
        failed = tl.load(bad + at, mask=mask, other=0) != 0
        tl.store(result + at, tl.where(failed, -1, token), mask=mask)
        held, last = held + alive.to(tl.int32), tl.where(alive, token, last)
        more = mask & (column + 1 < most)
        alive = alive & more & (failed == 0) & (token == tl.load(drafts + at + batch, mask=more, other=0))
    tl.store(result + width * batch + place, held.to(tl.int64), mask=mask)
    tl.store(ends + place, ((held - 1) * batch + place).to(tl.int64), mask=mask)
    tl.store(lengths + row, length + held, mask=mask)
    tl.store(counts + row, held, mask=mask)
    tl.store(last_tokens + row, last, mask=mask)
    tl.store(generated + row, tl.load(generated + row, mask=mask, other=0) + held, mask=mask)
