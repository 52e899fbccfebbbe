"""Grouping of decode rows and the shared causal masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.attention.reading import FREE_PADDING, MAX_GROUP_TOKENS, CausalMasks, group_by_length


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([7], [[0]]),
        ([3, 60, 9], [[0, 1, 2]]),  # short rows share whatever their lengths
        ([1000, 5, 900, 8], [[0, 2], [1, 3]]),
        ([30000, 30000], [[0], [1]]),  # together they would exceed the gather's bound
        ([100000], [[0]]),  # a row above the bound still runs
    ],
)
def test_groups(lengths: list[int], expected: list[list[int]]) -> None:
    groups = group_by_length(np.arange(len(lengths)), np.array(lengths, dtype=np.int64))
    assert [group.tolist() for group in groups] == expected


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 40000), max_size=40))
def test_groups_hold_each_row_once_and_keep_their_bounds(lengths: list[int]) -> None:
    groups = group_by_length(np.arange(len(lengths)), np.array(lengths, dtype=np.int64))
    assert sorted(np.concatenate(groups).tolist() if groups else []) == list(range(len(lengths)))
    for group in groups:
        inside = [lengths[i] for i in group]
        assert max(inside) - min(inside) <= max(FREE_PADDING, max(inside) // 4)
        assert len(inside) == 1 or len(inside) * max(inside) <= MAX_GROUP_TOKENS
        assert group.tolist() == sorted(group.tolist())


@pytest.mark.parametrize("window", [None, 3])
def test_masks_are_aligned_to_the_last_query_and_key_at_any_size(window: int | None) -> None:
    masks = CausalMasks(max_queries=4)
    like = torch.zeros(1, dtype=torch.float16)
    for queries, keys in ((1, 1), (4, 4), (2, 9), (4, 40), (3, 5)):
        mask = masks.cut(queries, keys, window, like)
        assert mask.dtype == torch.float16
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        seen = (distance >= 0) & (distance < (window or keys))
        assert torch.equal(mask == 0, seen)
        assert bool(torch.isneginf(mask[~seen]).all())
