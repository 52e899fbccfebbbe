"""Decoders with layer norms and a plain MLP. GPT-2: learned positions instead of rotation, matrices stored [inputs,
outputs]. OPT: learned positions, which begin at the third row of their table, ReLUs. StarCoder 2: biases throughout;
where there is a window, it holds for all layers. Nemotron: norms store their weight minus one, squared ReLUs, half of
each head rotates."""

from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig
from bough.models.family import ModelFamily, layer_norms, window_fields
from bough.models.fields import Fields
from bough.models.names import Names, Piece, fused


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
