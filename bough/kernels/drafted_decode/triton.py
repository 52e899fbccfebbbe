"""The inputs of decode steps in one launch, which a captured graph can begin with; with drafts also their end.

A step with drafts has `width` columns of a token of each row, back to back. The host sends a line for each row; how
long the row is and how many tokens its last step gave, the host may not know yet, but the device does: `of_rows` are
lengths, those counts (int32) and last tokens (int64), by row number.
"""

import torch
import triton
import triton.language as tl


def decode_inputs_(
    rows: torch.Tensor,
    lengths: torch.Tensor,
    new_pages: torch.Tensor,
    page_tables: torch.Tensor,
    last_tokens: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
) -> None:
    """As the reference. Rows are distinct, apart from padding, which writes page 0 to the scratch row."""
    batch = rows.shape[0]
    block = 128
    _decode_inputs[(triton.cdiv(batch, block),)](
        rows, lengths, new_pages, page_tables, last_tokens, token_ids, positions, slots, batch, new_pages.stride(0),
        page_tables.stride(0), page_tables.stride(1), slots.stride(0),
        GROUPS=len(page_tables), PAGE_SIZE=page_size, BLOCK=block,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _decode_inputs(
    rows, lengths, new_pages, page_tables, last_tokens, token_ids, positions, slots,
    batch: int, new_stride: int, table_stride: int, row_stride: int, slot_stride: int,
    GROUPS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < batch
    row = tl.load(rows + at, mask=mask, other=0).to(tl.int64)
    position = tl.load(lengths + at, mask=mask, other=1) - 1
    for group in tl.static_range(GROUPS):
        new = tl.load(new_pages + group * new_stride + at, mask=mask, other=0)
        entry = page_tables + group * table_stride + row * row_stride + position // PAGE_SIZE
        page = tl.where(new > 0, new, tl.load(entry, mask=mask, other=0))
        tl.store(entry, page, mask=mask)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        tl.store(slots + group * slot_stride + at, slot, mask=mask)
    tl.store(token_ids + at, tl.load(last_tokens + row, mask=mask, other=0), mask=mask)
    tl.store(positions + at, position.to(tl.int64), mask=mask)


# Of a row's line: its number, how many tokens it computes, its length and the tokens of its last step (negative: as the
# device knows them), and how many of the drafts, which follow, its last step may have given already.
FIELDS = 5
BLOCK = 64


def drafted_inputs_(
    lines: torch.Tensor,  # [batch, FIELDS + drafts] int32
    of_rows: tuple[torch.Tensor, ...],
    page_tables: torch.Tensor,  # [groups, rows, pages] int32
    columns: torch.Tensor,  # [2, width * batch] int32, written: rows and lengths
    places: torch.Tensor,  # [2 + groups, width * batch] int64, written: tokens, positions and slots
    page_size: int,
) -> None:
    """What each row computes. In columns that a row has no token for, the last row stands: it is padding."""
    batch = len(lines)
    _inputs[(triton.cdiv(batch, BLOCK), columns.shape[1] // batch)](
        lines, *of_rows, page_tables, columns, places, batch, lines.stride(0), columns.stride(0), places.stride(0),
        page_tables.stride(0), page_tables.stride(1), page_tables.shape[1] - 1,
        FIELDS=FIELDS, GROUPS=len(page_tables), PAGE_SIZE=page_size, BLOCK=BLOCK,
    )  # fmt: skip


def count_held_(
    lines: torch.Tensor,
    of_rows: tuple[torch.Tensor, ...],
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
        lines, *of_rows, generated, drafts, tokens, bad, result, ends, batch, len(tokens) // batch, lines.stride(0),
        BLOCK=BLOCK,
    )  # fmt: skip


@triton.jit
def _known(line, FIELD: tl.constexpr, row, values, mask):
    sent = tl.load(line + FIELD, mask=mask, other=0)
    return tl.where(sent < 0, tl.load(values + row, mask=mask, other=0), sent)


@triton.jit(do_not_specialize=["batch", "scratch"])
def _inputs(
    lines, lengths, counts, last_tokens, page_tables, columns, places, batch: int, line_stride: int,
    column_stride: int, place_stride: int, table_stride: int, row_stride: int, scratch: int,
    FIELDS: tl.constexpr, GROUPS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place, column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    mask, at, line = place < batch, column * batch + place, lines + place * line_stride
    own = tl.load(line, mask=mask, other=0).to(tl.int64)
    live = mask & (column < tl.load(line + 1, mask=mask, other=0))
    row = tl.where(live, own, scratch)
    position = tl.where(live, _known(line, 2, own, lengths, mask) + column, 0)
    passed = tl.minimum(_known(line, 3, own, counts, mask) - 1, tl.load(line + 4, mask=mask, other=0))
    draft = line + FIELDS + tl.maximum(passed, 0) + column - 1
    token = tl.load(draft, mask=live & (column > 0), other=0).to(tl.int64)
    token += tl.load(last_tokens + row, mask=mask & (column == 0), other=0)
    tl.store(columns + at, row.to(tl.int32), mask=mask)
    tl.store(columns + column_stride + at, position + 1, mask=mask)
    tl.store(places + at, token, mask=mask)
    tl.store(places + place_stride + at, position.to(tl.int64), mask=mask)
    for group in tl.static_range(GROUPS):
        entry = page_tables + group * table_stride + row * row_stride + position // PAGE_SIZE
        slot = tl.load(entry, mask=mask, other=0).to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        tl.store(places + (2 + group) * place_stride + at, slot, mask=mask)


@triton.jit(do_not_specialize=["batch", "width"])
def _count_held(
    lines, lengths, counts, last_tokens, generated, drafts, tokens, bad, result, ends, batch: int, width: int,
    line_stride: int, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask, line = place < batch, lines + place * line_stride
    row, most = tl.load(line, mask=mask, other=0).to(tl.int64), tl.load(line + 1, mask=mask, other=0)
    held, last, alive = place * 0, tl.load(tokens + place, mask=mask, other=0), mask
    for column in range(width):
        at, more = column * batch + place, mask & (column + 1 < most)
        token, failed = tl.load(tokens + at, mask=mask, other=0), tl.load(bad + at, mask=mask, other=0) != 0
        tl.store(result + at, tl.where(failed, -1, token), mask=mask)
        held, last = held + alive.to(tl.int32), tl.where(alive, token, last)
        alive = alive & more & (failed == 0) & (token == tl.load(drafts + at + batch, mask=more, other=0))
    tl.store(result + width * batch + place, held.to(tl.int64), mask=mask)
    tl.store(ends + place, ((held - 1) * batch + place).to(tl.int64), mask=mask)
    tl.store(lengths + row, _known(line, 2, row, lengths, mask) + held, mask=mask)
    tl.store(counts + row, held, mask=mask)
    tl.store(last_tokens + row, last, mask=mask)
    tl.store(generated + row, tl.load(generated + row, mask=mask, other=0) + held, mask=mask)
