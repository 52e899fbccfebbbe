"""What config.json of DeepSeek's models means."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bough.core.errors import ModelError
from bough.core.model_config import IndexConfig, LatentConfig, ModelConfig, MoEConfig
from bough.core.settings import ModelSettings
from bough.loader.config import read_config
from bough.loader.locate import find_files
from bough.models.fields import Fields
from bough.models.names import interleaved_rows
from bough.models.registry import find_family

V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 5,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "max_position_embeddings": 163_840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def read(**changes: Any) -> ModelConfig:
    given = {**V3, **changes}
    family = find_family(given["model_type"])
    return family.read_config(Fields("config.json", {**family.defaults, **given}))


def test_v2_lite() -> None:
    config = read_config(find_files(ModelSettings(model_shape="deepseek-v2-lite")))
    assert config.latent == LatentConfig(rank=512, rope_dim=64, nope_dim=128, value_dim=128, query_rank=None)
    assert (config.num_kv_heads, config.head_dim, config.context_length) == (1, 192, 163_840)
    temperature = 0.1 * 0.707 * math.log(40) + 1.0
    assert config.query_scale == pytest.approx(192**-0.5 * temperature**2)
    assert config.rope.attention_factor == 1.0
    assert config.moe == MoEConfig(
        experts=64,
        per_token=6,
        intermediate_size=1408,
        renormalise=False,
        shared_size=2816,
        dense_layers=(True, *[False] * 26),
    )


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2"])
def test_v3_and_kimi(model_type: str) -> None:
    config = read(model_type=model_type, n_group=4, topk_group=2)
    assert config.architecture == "DeepseekV3ForCausalLM"
    assert config.latent is not None and config.latent.query_rank == 1536
    assert config.query_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1.0) ** 2)
    moe = config.moe
    assert moe is not None and (moe.scores, moe.group_score, moe.correction_bias) == ("sigmoid", "best_two", True)
    assert (moe.renormalise, moe.scale, moe.groups, moe.top_groups) == (True, 2.5, 4, 2)
    assert (moe.dense_layers, moe.shared_size) == ((True, True, True, False, False), 2048)


@pytest.mark.parametrize("model_type", ["deepseek_v32", "glm_moe_dsa"])
def test_sparse_attention(model_type: str) -> None:
    config = read(model_type=model_type)
    heads, layers = (64, ()) if model_type == "deepseek_v32" else (32, (True,) * 5)
    assert config.latent is not None and config.latent.index == IndexConfig(heads, 128, 2048, layers)
    assert config.choosing_layers == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("changes", "choosing"),
    [
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [0, 2, 4]),
        ({"index_topk_freq": 3}, [0, 1, 4]),
        ({"index_topk_pattern": "FSSFF"}, [0, 3, 4]),
        ({"indexer_types": ["full", "shared", "full", "full", "shared"], "index_topk_pattern": "FFFFF"}, [0, 2, 3]),
    ],
)
def test_layers_that_share_a_choice_of_tokens(changes: dict[str, Any], choosing: list[int]) -> None:
    assert read(model_type="glm_moe_dsa", **changes).choosing_layers == choosing


def test_layers_with_experts_may_be_listed() -> None:
    moe = read(mlp_layer_types=["sparse", "dense", "sparse", "sparse", "dense"], first_k_dense_replace=3).moe
    assert moe is not None and moe.dense_layers == (False, True, False, False, True)


def test_without_stretched_context_scores_have_the_usual_scale() -> None:
    assert read(rope_scaling=None).query_scale == 192**-0.5


def test_every_so_manieth_layer_may_have_experts() -> None:
    moe = read(first_k_dense_replace=1, moe_layer_freq=2).moe
    assert moe is not None and moe.dense_layers == (True, True, False, True, False)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"attention_bias": True}, r"attention_bias = True is not supported\."),
        ({"n_group": 3}, "256 experts do not make 3 groups"),
        ({"topk_group": 9}, "of which 9 are kept"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must say dense or sparse for each layer"),
        ({"model_type": "deepseek_v32", "q_lora_rank": None}, "sparse attention needs a q_lora_rank"),
        ({"model_type": "deepseek_v32", "index_head_dim": 32}, "smaller than qk_rope_head_dim"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full"]}, "must say full or shared for 5 layers"),
        ({"model_type": "glm_moe_dsa", "index_topk_pattern": "SFFFF"}, "the first layer has no other"),
        (
            {"first_k_dense_replace": "two"},
            "first_k_dense_replace must be a whole number from 0 to 2,147,483,647, got 'two'",
        ),
        (
            {"model_type": "deepseek_v2", "num_experts_per_tok": 6, "topk_method": "noaux_tc"},
            "'noaux_tc' is not supported",
        ),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        read(**changes)


def test_rows_that_do_not_rotate_stay_in_place() -> None:
    assert list(interleaved_rows(1, 6, slice(4))) == [0, 2, 1, 3, 4, 5]
    assert list(interleaved_rows(2, 6, slice(2, None))) == [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]
    config = read()
    names = find_family("deepseek_v3").names(config)
    assert set(names) == {f"model.layers.*.self_attn.{name}" for name in ("q_b_proj", "kv_a_proj_with_mqa")}
    assert not find_family("deepseek_v3").names(read(rope_interleave=False))
