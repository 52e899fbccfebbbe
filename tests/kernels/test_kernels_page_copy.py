"""Pages of several tensors at once, against `GroupPool.read_pages` and `write_pages`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.page_copy.triton import copy_pages_
from bough.memory.pools.group_pool import GroupPool

WIDTHS = [(64, 8), (12,), (1,), (6, 3), (4096,)]  # of a token in each layer: the last takes several programs


@pytest.mark.parametrize("widths", [WIDTHS[:1], WIDTHS[:2], WIDTHS, WIDTHS[-1:]])
@pytest.mark.parametrize("page_size", [1, 4])
def test_pages_become_lines_and_lines_pages(
    widths: list[tuple[int, ...]], page_size: int, device: torch.device
) -> None:
    def pool() -> GroupPool:
        tensors = [torch.empty(9 * page_size, *width, dtype=torch.int8, device=device) for width in widths]
        return GroupPool([tensor.random_() for tensor in tensors], page_size, "content", range(len(widths)))

    one, other, still = pool(), pool(), torch.tensor([0, 2, 4, 6, 7], device=device)
    pages, elsewhere = torch.tensor([7, 3, 8], device=device), torch.tensor([1, 8, 5], device=device)
    before = other.read_pages(still[:-1])
    for part in one.parts(1):
        lines = torch.zeros(3, part.columns.stop - part.columns.start, dtype=torch.uint8, device=device)
        copy_pages_(one.table[part.tensors], one.sizes[part.tensors], pages, lines, into_pages=False)
        assert lines.equal(one.read_pages(pages, part))
        copy_pages_(other.table[part.tensors], other.sizes[part.tensors], elsewhere, lines, into_pages=True)
    assert other.read_pages(elsewhere).equal(one.read_pages(pages))
    assert other.read_pages(still[:-1]).equal(before)


def test_no_pages_are_nothing_to_do(device: torch.device) -> None:
    pool, none = GroupPool([torch.zeros(4, 8, device=device)], 1, "content"), torch.empty(0, 32, device=device)
    copy_pages_(pool.table, pool.sizes, torch.empty(0, dtype=torch.int64, device=device), none.byte(), False)
