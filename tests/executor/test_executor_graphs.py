"""The ladder of batch sizes that get a CUDA graph."""

from __future__ import annotations

import pytest

from bough.executor.graphs import decode_sizes


@pytest.mark.parametrize("largest", [1, 7, 16, 256, 500, 512, 1000])
def test_the_ladder_ends_at_the_largest_and_wastes_little(largest: int) -> None:
    sizes = decode_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    for batch in range(1, largest + 1):
        rung = next(size for size in sizes if size >= batch)
        assert rung - batch < max(2, 8, batch // 8)
