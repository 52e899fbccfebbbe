"""The inputs of a decode step: new pages enter the table, padding touches only the scratch row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bough.kernels.drafted_decode import triton
from tests.kernels.references import decode_inputs as reference


@pytest.mark.parametrize("implementation", [reference.decode_inputs_, triton.decode_inputs_], ids=["torch", "triton"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_it_says_what_each_row_computes(
    implementation: Callable[..., None], page_size: int, device: torch.device
) -> None:
    table = torch.arange(1, 101, dtype=torch.int32, device=device).view(2, 5, 10)
    table[:, 4] = 0  # the scratch row
    before = table.clone()
    last = torch.tensor([10, 11, 12, 13, 0], device=device)
    rows = torch.tensor([2, 0, 4, 4], dtype=torch.int32, device=device)
    lengths = torch.tensor([6, 5, 1, 1], dtype=torch.int32, device=device)
    new = torch.tensor([[77, 0, 0, 0], [88, 0, 0, 0]], dtype=torch.int32, device=device)
    ids, positions = (torch.full((4,), -1, device=device) for _ in range(2))
    slots = torch.full((2, 4), -1, device=device)
    implementation(rows, lengths, new, table, last, ids, positions, slots, page_size)
    assert ids.tolist() == [12, 10, 0, 0] and positions.tolist() == [5, 4, 0, 0]
    place, other = 5 // page_size, 4 // page_size
    for group, page in ((0, 77), (1, 88)):
        assert slots[group].tolist() == [
            page * page_size + 5 % page_size,
            int(before[group, 0, other]) * page_size + 4 % page_size,
            0,
            0,
        ]
        before[group, 2, place] = page
    assert torch.equal(table, before)
