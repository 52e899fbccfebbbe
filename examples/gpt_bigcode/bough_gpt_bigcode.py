"""GPT-NeoX (Pythia) for Bough: layer norms with biases, a plain MLP beside attention, a quarter of each head rotates.

Installing this package is all that it takes: `bough serve --model-path EleutherAI/pythia-160m` finds it through the
entry point in pyproject.toml. Nothing here imports torch before a model is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bough import layers
from bough.core.model_config import ModelConfig
from bough.models.family import PLAIN, ModelFamily
from bough.models.fields import Fields
from bough.models.names import Names, fused


@dataclass(frozen=True, slots=True)
class GptNeoXConfig(ModelConfig):
    parallel_residual: bool = True


class GptNeoX(ModelFamily):
    architectures = ("GPTNeoXForCausalLM",)
    model_types = ("gpt_neox",)
    config_type = GptNeoXConfig
    activations = PLAIN
    partial_rotation = True
    renamed_fields: ClassVar = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "hidden_act": "gelu",
        "attention_bias": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {
            "norm": "layer",
            "norm_bias": True,
            "norm_eps": config.number("layer_norm_eps", 1e-5),
            "mlp": "plain",
            "mlp_bias": True,
            "parallel_residual": config.boolean("use_parallel_residual", True),
        }

    def names(self, config: ModelConfig) -> Names:
        ours, theirs = "model.layers.*", "gpt_neox.layers.*"
        qkv = [f"{ours}.self_attn.{part}_proj" for part in "qkv"]
        return {
            "gpt_neox.embed_in": "model.embed_tokens",
            "gpt_neox.final_layer_norm": "model.norm",
            "embed_out": "lm_head",
            # Head by head, the rows of its query, its key and its value.
            f"{theirs}.attention.query_key_value": fused(qkv, (config.head_dim,) * 3, groups=config.num_heads),
            f"{theirs}.attention.dense": f"{ours}.self_attn.o_proj",
            f"{theirs}.mlp.dense_h_to_4h": f"{ours}.mlp.up_proj",
            f"{theirs}.mlp.dense_4h_to_h": f"{ours}.mlp.down_proj",
            "gpt_neox.": "model.",  # the norms of each layer have the names that they have here
        }

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> Any:
        parallel = isinstance(config, GptNeoXConfig) and config.parallel_residual
        return (layers.ParallelBlock if parallel else layers.PreNormBlock)(config, layer, placement)
