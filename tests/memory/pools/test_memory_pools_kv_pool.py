"""Shapes and sizes of the key/value pool, whole and shared among ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bough.core.errors import ResourceError
from bough.core.model_config import IndexConfig, LatentConfig, ModelConfig, RopeConfig
from bough.distributed.topology import Topology
from bough.memory.pools.kv_pool import KVPool, cache_dtype

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=10,
    context_length=128,
    norm_eps=1e-5,
    rope=RopeConfig(10000.0),
)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (2, 1), (4, 1)])
def test_holds_the_ranks_heads_and_a_scratch_page(ranks: int, kv_heads: int) -> None:
    topology = Topology(ranks - 1, ranks)
    pool = KVPool(CONFIG, (5,), 16, torch.bfloat16, torch.device("cpu"), topology)
    assert len(pool.keys) == len(pool.values) == 3
    for tensor in (*pool.keys, *pool.values):
        assert tensor.shape == (6 * 16, kv_heads, 4)
        assert tensor.dtype == torch.bfloat16
    held = sum(tensor.nbytes for tensor in (*pool.keys, *pool.values))
    assert KVPool.bytes_per_token(CONFIG, torch.bfloat16, topology) == (held // (6 * 16),)


def test_8_bits_halve_what_a_token_costs_and_come_with_scales() -> None:
    place = (torch.device("cpu"), Topology())
    assert cache_dtype("auto", torch.float16) == torch.float16
    assert cache_dtype("bf16", torch.float32) == cache_dtype("bfloat16", torch.float32) == torch.bfloat16
    dtype = cache_dtype("fp8_e4m3", torch.bfloat16)
    wide, narrow = (KVPool.bytes_per_token(CONFIG, each, Topology()) for each in (torch.bfloat16, dtype))
    assert wide == (2 * narrow[0],)
    assert KVPool(CONFIG, (5,), 16, dtype, *place).key_scales == [1.0] * 3
    pool = KVPool(CONFIG, (5,), 16, dtype, *place, [(0.5, 0.25), (1.0, 2.0), (3.0, 4.0)])
    assert (pool.key_scales, pool.value_scales) == ([0.5, 1.0, 3.0], [0.25, 2.0, 4.0])
    assert pool.keys[0].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_move_with_all_their_layers(dtype: torch.dtype, page_size: int) -> None:
    pools = [KVPool(CONFIG, (5,), page_size, dtype, torch.device("cpu"), Topology()) for _ in range(2)]
    for place, pool in enumerate(pools):
        for layer, tensor in enumerate((*pool.keys, *pool.values)):
            numbers = torch.arange(tensor.numel()).view(tensor.shape) * (layer + 7 * place + 1) % 50
            tensor.copy_(numbers.float())
    source, target = (pool.groups[0] for pool in pools)
    untouched = target.read_pages(torch.tensor([0, 1, 4, 5])).clone()
    content = source.read_pages(torch.tensor([5, 1]))
    assert content.shape == (2, source.page_bytes) and content.dtype == torch.uint8
    assert (source.page_bytes,) == tuple(page_size * n for n in KVPool.bytes_per_token(CONFIG, dtype, Topology()))
    target.write_pages(torch.tensor([2, 3]), content)
    assert torch.equal(target.read_pages(torch.tensor([2, 3])), content)
    assert torch.equal(target.read_pages(torch.tensor([0, 1, 4, 5])), untouched)
    first = slice(5 * page_size, 6 * page_size)
    assert torch.equal(pools[1].values[2].float()[2 * page_size : 3 * page_size], pools[0].values[2].float()[first]), (
        "a page is a page of each layer"
    )


def test_layers_have_heads_of_their_own_or_read_those_of_others() -> None:
    config = replace(
        CONFIG,
        num_layers=5,
        sliding_window=16,
        sliding_layers=(True, False, True, True, False),
        full_kv_heads=1,
        full_head_dim=6,
        shared_kv_layers=2,
    )
    scales = [(float(layer), layer + 0.5) for layer in range(1, 6)]
    pool = KVPool(config, (5, 3), 16, torch.float8_e4m3fn, torch.device("cpu"), Topology(), scales)
    assert pool.keys[1].shape == (6 * 16, 1, 6) and pool.keys[0].shape == pool.keys[2].shape == (4 * 16, 2, 4)
    assert pool.keys[3] is pool.keys[2] and pool.values[4] is pool.values[1]
    assert pool.key_scales == [1.0, 2.0, 3.0, 3.0, 2.0] and pool.value_scales == [1.5, 2.5, 3.5, 3.5, 2.5]
    assert [group.page_bytes for group in pool.groups] == [16 * 2 * 6, 16 * 2 * 2 * 8]
    assert KVPool.bytes_per_token(config, torch.float8_e4m3fn, Topology()) == (2 * 6, 2 * 2 * 8)
    pool.keys[2].view(torch.uint8)[:] = torch.full((), 2.0).to(torch.float8_e4m3fn).view(torch.uint8)
    keys, values = pool.read_tokens(3, torch.tensor([5, 1]), torch.float32)
    assert keys.shape == values.shape == (2, 2, 4) and (keys == 2.0 * 3.0).all()


@pytest.mark.parametrize("ranks", [1, 4])
def test_of_latents_there_is_one_line_a_token_on_every_rank(ranks: int) -> None:
    config = replace(CONFIG, num_kv_heads=1, latent=LatentConfig(rank=6, rope_dim=2, nope_dim=3, value_dim=5))
    topology, place = Topology(ranks - 1, ranks), (torch.device("cpu"), Topology(ranks - 1, ranks))
    assert KVPool.bytes_per_token(config, torch.bfloat16, topology) == (3 * 8 * 2,)
    pool, other = (KVPool(config, (5,), 4, torch.bfloat16, *place, [(0.5, 9.0)] * 3) for _ in range(2))
    assert pool.groups[0].page_bytes == 4 * 3 * 8 * 2
    assert pool.value_scales == pool.key_scales == [0.5] * 3, "values are keys, and have their scale"
    for layer, (keys, values) in enumerate(zip(pool.keys, pool.values, strict=True)):
        assert (keys.shape, values.shape) == ((24, 1, 8), (24, 1, 6))
        keys.copy_(torch.arange(keys.numel()).view(keys.shape) % 50 + layer)
        assert torch.equal(values, keys[..., :6])
    pages = torch.tensor([3, 1])
    other.groups[0].write_pages(pages, pool.groups[0].read_pages(pages))
    for mine, theirs in zip(pool.keys, other.keys, strict=True):
        assert torch.equal(mine.view(6, -1)[pages], theirs.view(6, -1)[pages])
    pool.release()
    pool.restore()
    pool.keys[1].fill_(3.0)
    assert bool((pool.values[1] == 3.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_layers_that_choose_tokens_keep_index_keys_in_the_same_pages(dtype: torch.dtype) -> None:
    index = IndexConfig(heads=3, head_dim=5, top=4, layers=(True, False, True))
    latent = LatentConfig(rank=6, rope_dim=2, nope_dim=3, value_dim=5, index=index)
    config = replace(CONFIG, num_kv_heads=1, latent=latent)
    pool, other = (KVPool(config, (5,), 4, dtype, torch.device("cpu"), Topology()) for _ in range(2))
    wide = torch.bfloat16 if dtype.itemsize == 1 else dtype
    assert {layer: keys.dtype for layer, keys in pool.index_keys.items()} == {0: wide, 2: wide}
    for layer, keys in pool.index_keys.items():
        keys.copy_(torch.arange(keys.numel()).view(24, 5) % 50 + layer)
    per_token = 3 * 8 * dtype.itemsize + 2 * 5 * wide.itemsize
    assert KVPool.bytes_per_token(config, dtype, Topology()) == (per_token,)
    assert pool.groups[0].page_bytes == 4 * per_token
    pages = torch.tensor([3, 1])
    other.groups[0].write_pages(pages, pool.groups[0].read_pages(pages))
    for layer, mine in pool.index_keys.items():
        assert torch.equal(mine.view(6, -1)[pages], other.index_keys[layer].view(6, -1)[pages])


def test_memory_is_given_back_and_taken_again() -> None:
    pool = KVPool(CONFIG, (5,), 1, torch.float32, torch.device("cpu"), Topology())
    tensors = [*pool.keys, *pool.values]
    pool.release()
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    pool.restore()
    (group,) = pool.groups
    group.write_pages(torch.arange(1, 6), torch.full((5, group.page_bytes), 1, dtype=torch.uint8))
    assert all(tensor is kept for tensor, kept in zip((*pool.keys, *pool.values), tensors, strict=True))
    assert (group.read_pages(torch.arange(1, 6)) == 1).all()


def test_memory_that_somebody_else_has_taken_is_said_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool(CONFIG, (5,), 1, torch.float32, torch.device("cpu"), Topology())
    pool.release()
    (group,), tensors = pool.groups, [*pool.keys, *pool.values]
    sizes = [tensor.nbytes for tensor in tensors]
    # More than any machine has: torch's allocator itself must refuse.
    monkeypatch.setattr(group, "_tensors", (*pool.keys, _Sized(pool.values[0], 1 << 60)))
    with pytest.raises(ResourceError, match="not enough free memory for the KV cache"):
        pool.restore()
    monkeypatch.undo()
    assert not any(tensor.untyped_storage().nbytes() for tensor in tensors)
    pool.restore()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == sizes


class _Sized:
    """A tensor that says it is larger."""

    def __init__(self, tensor: torch.Tensor, nbytes: int) -> None:
        self._tensor, self.nbytes = tensor, nbytes

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._tensor.untyped_storage()
