"""Shapes and sizes of the key/value pool, whole and shared among ranks."""

from __future__ import annotations

import pytest
import torch

from bough.core.model_config import ModelConfig, RopeConfig
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
