"""The states of recurrent layers: where each stands, copies in order, and pages that move."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bough.core.errors import ResourceError
from bough.core.model_config import RecurrentConfig
from bough.distributed.topology import Topology
from bough.memory.pools import state_pool
from bough.memory.pools.kv_pool import KVPool
from bough.memory.pools.state_pool import StatePool
from tests.memory.pools.test_memory_pools_kv_pool import CONFIG

CPU = torch.device("cpu")
STATES = RecurrentConfig((True, False, True), heads=4, value_dim=3, conv_width=4, key_heads=2, key_dim=5)
CHANNELS = 2 * 2 * 5 + 4 * 3


def numbered(pages: int = 5) -> StatePool:
    """Every page holds its number."""
    pool = StatePool(STATES, pages, CPU)
    for page in range(pages + 1):
        for tensor in (*pool.tails.values(), *pool.matrices.values()):
            tensor[page] = page
    return pool


def pages_of(pool: StatePool) -> list[float]:
    """What each page holds, which is one number throughout."""
    held = pool.read_pages(torch.arange(6)).view(torch.float32)
    assert bool((held == held[:, :1]).all())
    return held[:, 0].tolist()


def test_layers_have_tails_and_matrices_that_do_not_overlap() -> None:
    pool = StatePool(STATES, 5, CPU)
    parts = [pool.tails[0], pool.matrices[0], pool.tails[2], pool.matrices[2]]
    assert [tuple(part.shape) for part in parts] == [(6, 3, CHANNELS), (6, 4, 5, 3)] * 2
    assert pool.page_bytes == STATES.page_bytes == sum(part[0].nbytes for part in parts)
    for number, part in enumerate(parts):
        part.fill_(number)
    assert [part.unique().tolist() for part in parts] == [[0.0], [1.0], [2.0], [3.0]]


def test_a_convolution_alone_has_no_matrices() -> None:
    alone = RecurrentConfig((True,), heads=1, value_dim=7, conv_width=3)
    assert StatePool(alone, 2, CPU).page_bytes == 4 * 2 * 7


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_copies_are_made_in_order_and_page_0_stands_for_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second row gets the page that the first began with, after that was read."""
    monkeypatch.setattr(state_pool, "COPIED_BYTES", at_once * STATES.page_bytes)
    pool = numbered()
    for tensor in (*pool.tails.values(), *pool.matrices.values()):
        tensor[0] = float("nan")
    pool.copy(torch.tensor([4, 0, 1]), torch.tensor([2, 4, 1]))
    pool.tails[0][0] = pool.tails[2][0] = pool.matrices[0][0] = pool.matrices[2][0] = 7
    assert pages_of(pool) == [7, 1, 4, 3, 0, 5]


def test_pages_move_between_pools() -> None:
    source, target = numbered(), numbered()
    target.write_pages(torch.tensor([1, 2]), source.read_pages(torch.tensor([5, 3])))
    assert pages_of(target) == [0, 5, 3, 3, 4, 5]


def test_it_is_the_last_group_of_a_model_and_is_released_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, recurrent=STATES)
    pool = KVPool(config, (5, 4), 2, torch.bfloat16, CPU, Topology())
    assert pool.states is not None and pool.groups[1] is pool.states
    assert [len(keys) for keys in pool.keys] == [0, 12, 0], "one layer attends"
    assert KVPool.bytes_per_token(config, torch.bfloat16, Topology()) == (2 * 2 * 4 * 2,)
    pool.release()
    assert not pool.states.tails[0].untyped_storage().nbytes()
    pool.restore()
    pool.states.copy(torch.tensor([0]), torch.tensor([4]))
    assert not pool.states.matrices[2][4].any()
    both = replace(config, attention_layers=(True, True, True))
    assert KVPool.bytes_per_token(both, torch.bfloat16, Topology()) == (3 * 2 * 2 * 4 * 2,)


def test_memory_that_somebody_else_has_taken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = StatePool(STATES, 5, CPU)
    pool.release()
    huge = torch.empty((1 << 58,), dtype=torch.float32, device="meta")
    monkeypatch.setattr(pool, "_tensors", (_Sized(pool._memory, huge.nbytes),))
    with pytest.raises(ResourceError, match="not enough free memory for the states"):
        pool.restore()


class _Sized:
    """A tensor that claims another size."""

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self.nbytes, self.untyped_storage = nbytes, tensor.untyped_storage
