"""A tiny model by deterministic inference: a token's logits have the same bits however the token is computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bough.attention.invariant_backend import InvariantAttention
from bough.core.model_config import ModelConfig, RopeConfig
from bough.distributed.topology import Topology
from bough.kernels.invariant_attention.triton import config_for
from bough.kernels.triton_ops import INVARIANT
from bough.models.llama import Llama
from tests.fakes.forward import CPU, Forward, load_model
from tests.fakes.placements import placed

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=60,
    context_length=128,
    norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    tied_embeddings=True,
    qk_norm=True,
)
PROMPT = [1 + 7 * i % 59 for i in range(41)]
OTHER = [3 + 5 * i % 57 for i in range(23)]


def weights(config: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    slots = Llama().build(config, placed(Topology(), torch.float32, CPU)).slots()
    return {slot.name: torch.randn(slot.target.shape, generator=generator) * 0.2 for slot in slots}


def deterministic(config: ModelConfig) -> Forward:
    """The model on Triton's interpreter, with chunks so short that the prompt has three."""
    model = Llama().build(config, placed(Topology(), torch.float32, CPU, ops=INVARIANT))
    source = weights(config)
    for slot in model.slots():
        slot.target.copy_(source[slot.name])
    forward = Forward(model)
    shape = (config.num_heads, config.num_kv_heads, config.head_dim, torch.float32)
    tile = replace(config_for(*shape), chunk=16)
    forward.attention = InvariantAttention(
        lambda array: torch.from_numpy(np.ascontiguousarray(array)), 8, tile, tile, CPU
    )
    return forward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "side_by_side"), [(None, False), (20, True), pytest.param(20, False, marks=pytest.mark.long)]
)
def test_bits_do_not_depend_on_chunks_cache_or_company(window: int | None, side_by_side: bool) -> None:
    config = replace(CONFIG, sliding_window=window, sliding_layers=(True,) if window else (), chunked=side_by_side)
    whole = deterministic(config).step({0: PROMPT})[0]
    plain = Forward(load_model(config, weights(config))).step({0: PROMPT})[0]
    torch.testing.assert_close(whole, plain, atol=1e-4, rtol=1e-4)

    chunked = deterministic(config)
    steps = [{1: OTHER[:9], 0: PROMPT[:13]}, {1: [OTHER[9]], 0: PROMPT[13:40]}, {0: [PROMPT[40]], 1: OTHER[10:]}]
    parts = [chunked.step(step)[0] for step in steps]
    assert torch.equal(torch.cat(parts), whole), "chunks in company, then a decode"

    cached = deterministic(config)
    cached.step({0: PROMPT[:30]})
    cached.share(0, 1, 30)
    assert torch.equal(cached.step({1: PROMPT[30:]})[1], whole[30:]), "behind a cached prefix"

    decoded = deterministic(config)
    decoded.step({0: PROMPT[:39]})
    for i in (39, 40):
        assert torch.equal(decoded.step({0: [PROMPT[i]]})[0], whole[i : i + 1]), "token by token"
