"""Arrays of all types share an arena; none lies in the way of another, and a step may be larger than expected."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.executor import staging
from bough.executor.staging import ALIGNMENT, Arena, Staging

ARRAYS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([np.int32, np.int64, np.float32, np.bool_])), min_size=1, max_size=12
)


@pytest.fixture(autouse=True, scope="module")
def ordinary_memory() -> Any:
    """Only a machine with a GPU can pin memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "pinned_bytes", lambda size: torch.empty(size, dtype=torch.uint8))
        yield


@settings(deadline=None, derandomize=True)
@given(steps=st.lists(ARRAYS, min_size=1, max_size=3))
def test_what_is_put_stays(steps: list[list[tuple[int, type]]]) -> None:
    arena = Arena(256, torch.device("cpu"))
    for step in steps:
        arena.reset()
        held: list[tuple[npt.NDArray[Any], torch.Tensor]] = []
        for i, (size, kind) in enumerate(step):
            array = (np.arange(size) * (i + 3) % 7).astype(kind)
            held.append((array, arena.put(array)))
            arena.take(3, torch.int64)[1].fill_(-1)
        for array, pinned in held:
            assert pinned.numpy().dtype == array.dtype and np.array_equal(pinned.numpy(), array)


def test_whatever_comes_first_the_next_is_aligned() -> None:
    arena = Arena(256, torch.device("cpu"))
    first = arena.put(np.ones(3, dtype=np.bool_))
    second = arena.take(1, torch.int64)[0]
    assert second.data_ptr() - first.data_ptr() == ALIGNMENT


def test_arrays_come_to_the_device_in_their_shape_and_back() -> None:
    ring = Staging(torch.device("cpu"), depth=2, size=64)
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    for _ in range(3):
        ring.next_step()
        there = ring.to_device(array)
        assert np.array_equal(there.numpy(), array)
        target = torch.zeros(12, dtype=torch.int32)
        ring.copy_into(target, array)
        assert target.tolist() == list(range(12))
        assert ring.to_host(there.view(-1)[2:7]).tolist() == [2, 3, 4, 5, 6]
