"""GPT-NeoX (Pythia) and StableLM: layer norms with biases, attention and MLP side by side or not, a quarter of each
head rotates. GPT-NeoX has a plain MLP and fused projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bough import layers
from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.models.family import PLAIN, ModelFamily
from bough.models.fields import Fields
from bough.models.names import Names, fused, pairs_apart, projections_apart


@dataclass(frozen=True, slots=True)
class GptNeoXConfig(ModelConfig):
    parallel_residual: bool = False


class GptNeoX(ModelFamily):
    architectures = ("GPTNeoXForCausalLM",)
    model_types = ("gpt_neox",)
    config_type = GptNeoXConfig
    activations = PLAIN
    partial_rotation = pairs_apart = True
    one_norm = False  # of attention and MLP, where they are side by side
    renamed_fields: ClassVar = {"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "hidden_act": "gelu",
        "attention_bias": True,
        "use_parallel_residual": True,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**_norms(config), "mlp": "plain", "mlp_bias": True}

    def names(self, config: ModelConfig) -> Names:
        ours, theirs = "model.layers.*", "gpt_neox.layers.*"
        # Head by head, the rows of its query, its key and its value.
        modules = [f"{ours}.self_attn.{part}_proj" for part in "qkv"]
        query, key, value = fused(modules, (config.head_dim,) * 3, groups=config.num_heads)
        return {
            "gpt_neox.embed_in": "model.embed_tokens",
            "gpt_neox.final_layer_norm": "model.norm",
            "embed_out": "lm_head",
            f"{theirs}.attention.query_key_value": [*pairs_apart(query, key, config), value],
            f"{theirs}.attention.dense": f"{ours}.self_attn.o_proj",
            f"{theirs}.mlp.dense_h_to_4h": f"{ours}.mlp.up_proj",
            f"{theirs}.mlp.dense_4h_to_h": f"{ours}.mlp.down_proj",
            "gpt_neox.": "model.",  # the norms of each layer have the names that they have here
        }

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> layers.Block:
        if isinstance(config, GptNeoXConfig) and config.parallel_residual:
            return layers.ParallelBlock(config, layer, placement, one_norm=self.one_norm)
        return layers.PreNormBlock(config, layer, placement)


class StableLm(GptNeoX):
    architectures = ("StableLmForCausalLM",)
    model_types = ("stablelm",)
    one_norm = True
    renamed_fields: ClassVar = {}
    defaults: ClassVar[dict[str, Any]] = {
        "max_position_embeddings": 4096,
        "partial_rotary_factor": 0.25,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.boolean("qk_layernorm"):
            raise ModelError(f"{config.where}: qk_layernorm is not supported; StableLM models up to 3B have none.")
        return {**_norms(config), "qkv_bias": config.boolean("use_qkv_bias"), "output_bias": False}

    def names(self, config: ModelConfig) -> Names:
        return projections_apart(config)


def _norms(config: Fields) -> dict[str, Any]:
    return {
        "norm": "layer",
        "norm_bias": True,
        "norm_eps": config.number("layer_norm_eps", 1e-5),
        "parallel_residual": config.boolean("use_parallel_residual"),
    }
