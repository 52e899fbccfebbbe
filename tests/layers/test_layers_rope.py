"""Rotary frequencies against transformers' own functions, for every kind of scaling."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bough.core.errors import ModelError
from bough.core.model_config import RopeConfig
from bough.layers.rope import frequencies, rope_table

LLAMA3 = RopeConfig(500000.0, "llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
YARN = RopeConfig(1000000.0, "yarn", factor=4.0, original_context=4096)
CASES: dict[str, tuple[RopeConfig, dict[str, Any]]] = {
    "default": (RopeConfig(10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
    "linear": (
        RopeConfig(10000.0, "linear", factor=8.0),
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    ),
    "llama3": (
        LLAMA3,
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "proportional": (
        RopeConfig(1000000.0, "proportional", factor=2.0, partial_rotary_factor=0.25, apart=True),
        {"rope_type": "proportional", "rope_theta": 1000000.0, "factor": 2.0, "partial_rotary_factor": 0.25},
    ),
    "yarn": (
        YARN,
        {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 4096},
    ),
    "yarn with its own magnitude": (
        RopeConfig(
            10000.0, "yarn", factor=16.0, original_context=2048, beta_fast=16.0, beta_slow=2.0, attention_factor=0.9
        ),
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
            "attention_factor": 0.9,
            "original_max_position_embeddings": 2048,
        },
    ),
}


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("head_dim", [64, 128])
def test_angles_are_those_of_transformers(name: str, head_dim: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # takes seconds

    ours, parameters = CASES[name]
    config = LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=131072)
    config.rope_parameters = parameters
    theirs = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 17, 4095, 100_000])
    cos, sin = theirs(torch.zeros(1), positions[None])
    table = rope_table(ours, head_dim, 100_001, torch.device("cpu"))
    torch.testing.assert_close(table.cos[positions], cos[0, :, : head_dim // 2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(table.sin[positions], sin[0, :, : head_dim // 2], atol=1e-5, rtol=1e-5)


def test_half_a_pair_counts_as_one() -> None:
    from transformers import PhiConfig
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}  # 3 of 12 coordinates
    cos, _ = PhiRotaryEmbedding(PhiConfig(hidden_size=24, num_attention_heads=2, rope_parameters=rope))(
        torch.zeros(1), torch.arange(9)[None]
    )
    ours = RopeConfig(10000.0, partial_rotary_factor=0.25)
    assert ours.rotary_dim(12) == cos.shape[-1] == 4
    table = rope_table(ours, 12, 9, torch.device("cpu"))
    torch.testing.assert_close(torch.cat((table.cos, table.cos), -1), cos[0], atol=1e-5, rtol=1e-5)
    assert RopeConfig(10000.0, "proportional", partial_rotary_factor=0.25).rotary_dim(12) == 2


def test_stored_factors_divide_the_frequencies() -> None:
    """GGUF files store Llama 3's scaling as divisors: both forms must give the same rotation."""
    divisors = frequencies(RopeConfig(LLAMA3.theta), 64) / frequencies(LLAMA3, 64)
    stored = RopeConfig(LLAMA3.theta, factors=tuple(divisors.tolist()))
    torch.testing.assert_close(frequencies(stored, 64), frequencies(LLAMA3, 64), atol=0.0, rtol=1e-6)


def test_the_context_decides_between_two_sets_of_factors() -> None:
    rope = RopeConfig(10000.0, "longrope", original_context=32, factors=(4.0, 8.0), short_factors=(1.0, 2.0))
    for context, factors in ((32, rope.short_factors), (33, rope.factors)):
        expected = rope_table(RopeConfig(10000.0, factors=factors), 4, context, torch.device("cpu"))
        assert torch.equal(rope_table(rope, 4, context, torch.device("cpu")).sin, expected.sin)


@pytest.mark.parametrize("name", list(CASES))
def test_a_shape_alone_is_that_of_the_table(name: str) -> None:
    config, _ = CASES[name]
    table, shape = (rope_table(config, 64, 700, torch.device(device)) for device in ("cpu", "meta"))
    for made, meant in ((table.cos, shape.cos), (table.sin, shape.sin), (table.axes, shape.axes)):
        assert (made is None) == (meant is None)
        assert made is None or (meant.is_meta and (made.shape, made.dtype) == (meant.shape, meant.dtype))


def test_factors_must_be_as_many_as_frequencies() -> None:
    with pytest.raises(ModelError, match="has 3 factors, but 2 frequencies"):
        frequencies(RopeConfig(10000.0, factors=(1.0, 2.0, 3.0)), 4)
