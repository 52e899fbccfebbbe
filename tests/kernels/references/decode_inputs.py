"""The inputs of a decode step in plain torch."""

from __future__ import annotations

import torch


def decode_inputs_(
    rows: torch.Tensor,  # [batch] int32
    lengths: torch.Tensor,  # [batch] int32, the new token included
    new_pages: torch.Tensor,  # [groups, batch] int32, the page that a row gets with this step; 0: none
    page_tables: torch.Tensor,  # [groups, rows, pages] int32
    last_tokens: torch.Tensor,  # [rows] int64
    token_ids: torch.Tensor,  # [batch] int64, out
    positions: torch.Tensor,  # [batch] int64, out
    slots: torch.Tensor,  # [groups, batch] int64, out
    page_size: int,
) -> None:
    """Puts new pages into the rows' tables; says which token each row computes, where it stands and where it goes."""
    row = rows.long()
    position = lengths.long() - 1
    place = position // page_size
    page = torch.where(new_pages > 0, new_pages, page_tables[:, row, place])
    page_tables[:, row, place] = page
    token_ids.copy_(last_tokens[row])
    positions.copy_(position)
    slots.copy_(page.long() * page_size + position % page_size)
