"""Decoders with layer norms and a plain MLP. GPT-2: learned positions instead of rotation, matrices stored [inputs,
outputs]. OPT: learned positions, which begin at the third row of their table, ReLUs. StarCoder 2: biases throughout;
where there is a window, it holds for all layers. Nemotron: norms store their weight minus one, squared ReLUs, half of
each head rotates.

GPT-NeoX (Pythia): layer norms with biases, attention and a plain MLP side by side or not, a quarter of each head
rotates, projections are fused. StableLM is Llama with those norms and that rotation.

Command R: attention and MLP side by side after one layer norm, neighbours rotate, logits have a scale. Cohere 2 has
windows in most layers, and no rotation in the others.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from bough import layers
from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig
from bough.models.family import PLAIN, ModelFamily, layer_norms, rotating_windows, window_fields
from bough.models.fields import Fields
from bough.models.names import GgufNames, Names, Piece, fused, fused_qkv, pairs_apart, projections_apart


class Gpt2(ModelFamily):
    activation_field = "activation_function"

    def read_config(self, config: Fields) -> ModelConfig:
        inner = config.optional_integer("n_inner") or 4 * config.integer("n_embd")
        return super().read_config(Fields(config.where, {**config.values, "n_inner": inner}))

    def fields(self, config: Fields) -> dict[str, Any]:
        return {
            "rope": NO_ROPE,
            **layer_norms(config, "layer_norm_epsilon"),
            "query_scale": None if config.boolean("scale_attn_weights", True) else 1.0,
        }

    def names(self, config: ModelConfig) -> Names:
        ours = "model.layers.*"
        qkv = fused([f"{ours}.self_attn.{part}_proj" for part in "qkv"], (config.hidden_size,) * 3, transposed=True)
        names: Names = {
            **self.stated_names,
            "h.*.attn.c_attn": qkv,
            "h.*.attn.c_proj": Piece(f"{ours}.self_attn.o_proj", transposed=True),
            "h.*.mlp.c_fc": Piece(f"{ours}.mlp.up_proj", transposed=True),
            "h.*.mlp.c_proj": Piece(f"{ours}.mlp.down_proj", transposed=True),
        }
        return {**names, **{f"transformer.{name}": piece for name, piece in names.items()}}


class Opt(ModelFamily):
    activation_field = "activation_function"

    def fields(self, config: Fields) -> dict[str, Any]:
        width = config.integer("hidden_size")
        usual = config.boolean("do_layer_norm_before", True) and config.boolean("layer_norm_elementwise_affine", True)
        if not usual or config.integer("word_embed_proj_dim", width) != width:
            raise ModelError(
                f"{config.where}: norms after each layer and embeddings of another width (opt-350m) are not supported; "
                "the other sizes of OPT are."
            )
        return {"rope": NO_ROPE, **layer_norms(config), "mlp_bias": config.boolean("enable_bias")}

    def names(self, config: ModelConfig) -> Names:
        positions = Piece("model.embed_positions", slice(2, 2 + config.context_length))
        names: Names = {"decoder.embed_positions": positions, **self.stated_names}
        return {**names, **{f"model.{name}": piece for name, piece in names.items()}}


class Starcoder2(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        mlp = {"mlp": "plain", "mlp_bias": config.boolean("use_bias")}
        return {**layer_norms(config, "norm_epsilon"), **mlp, **window_fields(config, lambda layer: True)}


class Nemotron(ModelFamily):
    partial_rotation = pairs_apart = True

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**layer_norms(config, "norm_eps"), "norm_plus_one": True, "mlp": "plain"}


@dataclass(frozen=True, slots=True)
class GptNeoXConfig(ModelConfig):
    parallel_residual: bool = False


class GptNeoX(ModelFamily):
    config_type = GptNeoXConfig
    partial_rotation = pairs_apart = True
    one_norm = False  # of attention and MLP, where they are side by side

    def fields(self, config: Fields) -> dict[str, Any]:
        parallel = config.boolean("use_parallel_residual")
        return {**layer_norms(config), "mlp": "plain", "mlp_bias": True, "parallel_residual": parallel}

    def names(self, config: ModelConfig) -> Names:
        # Head by head, the rows of its query, its key and its value.
        modules = [f"model.layers.*.self_attn.{part}_proj" for part in "qkv"]
        query, key, value = fused(modules, (config.head_dim,) * 3, groups=config.num_heads)
        joined = [*pairs_apart(query, key, config), value]
        return {"gpt_neox.layers.*.attention.query_key_value": joined, **self.stated_names}

    def gguf_names(self, config: ModelConfig) -> GgufNames:
        """There the rows of all queries stand before those of all keys."""
        return {**super().gguf_names(config), "blk.*.attn_qkv": fused_qkv(config)}

    def block(self, config: ModelConfig, layer: int, placement: layers.Placement) -> layers.Block:
        if isinstance(config, GptNeoXConfig) and config.parallel_residual:
            return layers.ParallelBlock(config, layer, placement, one_norm=self.one_norm)
        return layers.PreNormBlock(config, layer, placement)


class StableLm(GptNeoX):
    activations = PLAIN
    one_norm = True

    def fields(self, config: Fields) -> dict[str, Any]:
        biases = {"qkv_bias": config.boolean("use_qkv_bias"), "output_bias": False}
        return {**layer_norms(config), **biases, "parallel_residual": config.boolean("use_parallel_residual")}

    def names(self, config: ModelConfig) -> Names:
        return projections_apart(config)


class Cohere(ModelFamily):
    pairs_apart = neighbours = True
    block_kind = "ParallelBlock"
    block_options: ClassVar[Mapping[str, Any]] = {"one_norm": True}

    def fields(self, config: Fields) -> dict[str, Any]:
        return {
            "norm": "layer",
            "norm_eps": config.number("layer_norm_eps", 1e-5),
            "logit_scale": config.number("logit_scale", 0.0625),
        }


class Cohere2(Cohere):
    def fields(self, config: Fields) -> dict[str, Any]:
        windows = rotating_windows(config, lambda layer: (layer + 1) % config.integer("sliding_window_pattern") != 0)
        return {**super().fields(config), **windows}
