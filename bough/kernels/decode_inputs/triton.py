# mypy: disable-error-code="import-untyped, untyped-decorator, no-untyped-def, no-untyped-call"
"""The inputs of a decode step in one launch, which a captured graph can begin with."""

from __future__ import annotations

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
