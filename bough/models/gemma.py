"""Gemma and Gemma 2: scaled embeddings, norms that store their weight minus one. Gemma 2 has norms after attention and
MLP as well, caps on scores and logits, and a window in every other layer. VaultGemma is Gemma 2 without those norms.

Gemma 3 has no caps but norms of heads; most layers see a window, with its own rotation. Multimodal checkpoints hold the
same text model, one level deeper. Tokens of an image attend to each other both ways.

Gemma 4: heads that are wider where layers see everything, values with a norm, and in small models layers that read
the keys and values of earlier ones and get a vector of each token for themselves. Some have experts beside the MLP.

Multimodal checkpoints hold the same text model, one level deeper. Tokens of an image get the vectors of the padding
token; in large models they see each other both ways where a window slides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bough import layers
from bough.core.model_config import Activation, MediaConfig, ModelConfig
from bough.models.family import GATED, Metadata, ModelFamily, read_moe, window_fields
from bough.models.fields import Fields
from bough.models.names import GGUF_MODULES, NESTED, Names, fused_experts, nested
from bough.models.rope_config import read_local_rope

ACTIVATIONS: dict[str, Activation] = {**GATED, "gelu": "gelu_tanh"}  # first checkpoints name the one, mean the other


class Gemma(ModelFamily):
    activations = ACTIVATIONS

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"embedding_scale": config.integer("hidden_size") ** 0.5, "norm_plus_one": True}


class Gemma2(Gemma):
    block_kind = "SandwichBlock"
    activation_field = "hidden_activation"
    layers_of_27b = 46

    def fields(self, config: Fields) -> dict[str, Any]:
        return {
            **super().fields(config),
            "query_scale": config.number("query_pre_attn_scalar") ** -0.5,
            "attention_softcap": config.optional_number("attn_logit_softcapping"),
            "logit_softcap": config.optional_number("final_logit_softcapping"),
            **window_fields(config, lambda layer: layer % 2 == 0),
        }

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """No key says that the models of 27B alone scale queries by hidden size per head."""
        wide = given["num_hidden_layers"] == self.layers_of_27b
        per_head = given["hidden_size"] // given["num_attention_heads"]
        return {"query_pre_attn_scalar": per_head if wide else given["head_dim"]}


class Gemma3(Gemma2):
    activations = GATED
    layers_of_27b = 62

    def fields(self, config: Fields) -> dict[str, Any]:
        windows = window_fields(config, lambda layer: (layer + 1) % config.integer("sliding_window_pattern") != 0)
        return {**super().fields(config), "local_rope": read_local_rope(config), "attention_softcap": None, **windows}

    def names(self, config: ModelConfig) -> Names:
        return NESTED


@dataclass(frozen=True, slots=True)
class Gemma4Config(ModelConfig):
    doubled_mlp: bool = False  # in layers that read the keys and values of others


class Gemma4(ModelFamily):
    config_type = Gemma4Config
    activation_field, block_kind = "hidden_activation", "SandwichBlock"
    gguf_modules = GGUF_MODULES["gemma4"]
    gguf_varying = (".attention.head_count_kv", ".feed_forward_length")
    partial_rotation = pairs_apart = True

    def read_media(self, config: Fields) -> MediaConfig | None:
        media, text = super().read_media(config), config.section("text_config")
        if media is None or text is None:
            return None
        whole = text.values.get("use_bidirectional_attention") == "vision"
        return replace(media, placeholder=text.count("pad_token_id", 0), whole=whole, whole_in_windows=whole)

    def fields(self, config: Fields) -> dict[str, Any]:
        windows = window_fields(config, lambda layer: (layer + 1) % 6 != 0)
        if windows:  # the last layer sees everything, whatever the file says
            windows["sliding_layers"] = (*windows["sliding_layers"][:-1], False)
        one_projection = config.boolean("attention_k_eq_v")
        return {
            **windows,
            **_full_heads(config, windows.get("sliding_layers", ()), one_projection),
            "full_keys_as_values": one_projection,
            "local_rope": read_local_rope(config),
            "shared_kv_layers": config.count("num_kv_shared_layers", 0),
            "doubled_mlp": config.boolean("use_double_wide_mlp"),
            "logit_softcap": config.optional_number("final_logit_softcapping"),
            "embedding_scale": config.integer("hidden_size") ** 0.5,
            "layer_inputs": config.count("hidden_size_per_layer_input"),
            "moe": read_moe(config, beside_mlp=True) if config.boolean("enable_moe_block") else None,
        }

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """The first of the layers that see everything tells of the others, which have wider heads; of these, a part
        does not rotate, and its frequencies are divided by what makes them zero."""
        full, heads = given["layer_types"].index("full_attention"), meta.each(".attention.head_count_kv")
        factors, theta = given["rope_factors"], given["rope_theta"]
        turned = sum(factor == 1.0 for factor in factors) / len(factors)
        whole = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": turned}
        return {
            "head_dim": meta.need(".attention.key_length_swa"),
            "per_layer_config": {str(full): {"head_dim": given["head_dim"], "num_key_value_heads": heads[full]}},
            "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in meta.tensors,
            "use_double_wide_mlp": len(set(meta.each(".feed_forward_length"))) > 1,
            "enable_moe_block": bool(given.get("num_experts")),
            "rope_parameters": {"full_attention": whole, "sliding_attention": {}},
        }

    def names(self, config: ModelConfig) -> Names:
        if config.moe is None:
            return NESTED
        return nested({**self.stated_names, **fused_experts("model.layers.*.experts", config.moe)})

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> layers.SandwichBlock:
        if isinstance(config, Gemma4Config) and config.doubled_mlp and config.kv_source(layer) != layer:
            config = replace(config, intermediate_size=2 * config.intermediate_size)
        return layers.SandwichBlock(config, layer, placement)


def _full_heads(config: Fields, sliding: tuple[bool, ...], one_projection: bool) -> dict[str, Any]:
    """The heads of layers that see everything. Transformers writes them once for each such layer."""
    by_layer = config.section("per_layer_config")
    if by_layer is not None:
        own = by_layer.section(str(sliding.index(False) if sliding else 0)) or Fields(by_layer.where, {})
        return {
            "full_kv_heads": own.optional_integer("num_key_value_heads"),
            "full_head_dim": own.optional_integer("head_dim"),
        }
    fewer = config.optional_integer("num_global_key_value_heads") if one_projection else None
    return {"full_kv_heads": fewer, "full_head_dim": config.integer("global_head_dim")}
