from __future__ import annotations

import math
from typing import Any

import pytest

from bough.core.errors import ModelError
from bough.core.model_config import RopeConfig
from bough.models.fields import Fields
from bough.models.rope_config import read_local_rope, read_rope, trained_context

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(**values: Any) -> Fields:
    return Fields("config.json", {"max_position_embeddings": 1000, **values})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, RopeConfig(10_000.0)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, RopeConfig(5e5, "linear", 2.0)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "dynamic", "factor": 2}}, RopeConfig(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 7.0}, "sliding_attention": {"rope_theta": 8.0}}},
            RopeConfig(7.0),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"rope_type": "linear", "factor": 2}},
            RopeConfig(5e5, "linear", 2.0),
        ),
    ],
)
def test_both_generations_of_config(given: dict[str, Any], expected: RopeConfig) -> None:
    assert read_rope(config(**given)) == expected


def test_yarn_by_the_paper() -> None:
    rope = read_rope(config(rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}))
    assert (rope.kind, rope.factor, rope.original_context, rope.beta_fast, rope.beta_slow) == (
        "yarn",
        4.0,
        1000,
        16.0,
        1.0,
    )
    assert rope.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_yarn_by_the_checkpoint() -> None:
    given = {"rope_type": "yarn", "original_max_position_embeddings": 250, "attention_factor": 0.9}
    rope = read_rope(config(rope_scaling=given))
    assert (rope.factor, rope.original_context, rope.attention_factor, rope.truncate) == (4.0, 250, 0.9, True)
    assert not read_rope(config(rope_scaling={**given, "truncate": False})).truncate
    rope = read_rope(config(rope_scaling={"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}))
    assert rope.attention_factor == 1.0


def test_longrope() -> None:
    given = {"type": "su", "long_factor": [2, 3.5], "short_factor": [1.0, 1.5]}
    rope = read_rope(config(rope_scaling=given, original_max_position_embeddings=250))
    assert (rope.kind, rope.original_context, rope.factors, rope.short_factors) == (
        "longrope",
        250,
        (2.0, 3.5),
        (1.0, 1.5),
    )
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(250)))


def test_an_alpha_raises_the_base() -> None:
    shape = {"hidden_size": 64, "num_attention_heads": 4}
    rope = read_rope(config(**shape, rope_theta=1e4, rope_scaling={"type": "dynamic", "alpha": 50.0}))
    assert rope == RopeConfig(1e4 * 50.0 ** (16 / 14))


def test_context_is_the_stretched_one_for_yarn_only() -> None:
    stretched = RopeConfig(1e4, "yarn", factor=4.0, original_context=1000)
    assert trained_context(config(), stretched) == 4000
    assert trained_context(config(max_position_embeddings=4000), stretched) == 4000
    assert trained_context(config(), RopeConfig(1e4, "linear", factor=4.0)) == 1000


def test_local_rope() -> None:
    assert read_local_rope(config(rope_theta=1e6)) == RopeConfig(10_000.0)
    assert read_local_rope(config(rope_local_base_freq=500.0)) == RopeConfig(500.0)
    assert read_local_rope(config(rope_parameters={"sliding_attention": {"rope_theta": 8.0}})) == RopeConfig(8.0)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"rope_parameters": {"rope_type": "axial"}},
            "'axial' is not supported; .*default, linear, llama3, yarn, longrope",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "long_factor is missing"),
        ({"rope_scaling": {"type": "su", "long_factor": [1.0, 0]}}, "long_factor must be a number above 0, got 0"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
    ],
)
def test_other_rotations_are_refused_by_name(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        read_rope(config(**given))
