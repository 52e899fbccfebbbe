"""GPT-BigCode (SantaCoder, StarCoder) for Bough: learned positions, layer norms, a plain MLP, one key-value head.

Installing this package is all that it takes: `bough serve --model-path bigcode/tiny_starcoder_py` finds it through the
entry point in pyproject.toml. Nothing here imports torch before a model is built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bough.core.model_config import NO_ROPE, ModelConfig
from bough.models.family import PLAIN, ModelFamily, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, fused


@dataclass(frozen=True, slots=True)
class GptBigCodeConfig(ModelConfig):
    multi_query: bool = True


class GptBigCode(ModelFamily):
    architectures = ("GPTBigCodeForCausalLM",)
    model_types = ("gpt_bigcode",)
    config_type = GptBigCodeConfig
    activation_field = "activation_function"
    activations = PLAIN
    renamed_fields: ClassVar = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
    }
    defaults: ClassVar[dict[str, Any]] = {
        "n_positions": 1024,
        "activation_function": "gelu_pytorch_tanh",
        "attention_bias": True,
        "tie_word_embeddings": True,
        "bos_token_id": 50_256,
        "eos_token_id": 50_256,
    }

    def read_config(self, config: Fields) -> ModelConfig:
        inner = config.optional_integer("n_inner") or 4 * config.integer("n_embd")
        return super().read_config(Fields(config.where, {**config.values, "n_inner": inner}))

    def fields(self, config: Fields) -> dict[str, Any]:
        heads, one = config.integer("num_attention_heads"), config.boolean("multi_query", True)
        return {
            "multi_query": one,
            "num_kv_heads": 1 if one else heads,
            "rope": NO_ROPE,
            "learned_positions": True,
            **layer_norms(config, "layer_norm_epsilon"),
            "mlp": "plain",
            "mlp_bias": True,
            "query_scale": None if config.boolean("scale_attn_weights", True) else 1.0,
        }

    def names(self, config: ModelConfig) -> Names:
        ours, theirs = "model.layers.*", "transformer.h.*"
        modules = [f"{ours}.self_attn.{part}_proj" for part in "qkv"]
        if isinstance(config, GptBigCodeConfig) and config.multi_query:
            qkv = fused(modules, (config.hidden_size, config.head_dim, config.head_dim))
        else:  # head by head, the rows of its query, its key and its value
            qkv = fused(modules, (config.head_dim,) * 3, groups=config.num_heads)
        return {
            "transformer.wte": "model.embed_tokens",
            "transformer.wpe": "model.embed_positions",
            "transformer.ln_f": "model.norm",
            f"{theirs}.ln_1": f"{ours}.input_layernorm",
            f"{theirs}.ln_2": f"{ours}.post_attention_layernorm",
            f"{theirs}.attn.c_attn": qkv,
            f"{theirs}.attn.c_proj": f"{ours}.self_attn.o_proj",
            f"{theirs}.mlp.c_fc": f"{ours}.mlp.up_proj",
            f"{theirs}.mlp.c_proj": f"{ours}.mlp.down_proj",
        }
