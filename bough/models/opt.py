"""OPT: learned positions, which begin at the third row of their table, layer norms, a plain MLP of ReLUs, biases."""

from __future__ import annotations

from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig
from bough.models.family import PLAIN, ModelFamily, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, Piece


class Opt(ModelFamily):
    activation_field = "activation_function"
    activations = PLAIN

    def fields(self, config: Fields) -> dict[str, Any]:
        width = config.integer("hidden_size")
        usual = config.boolean("do_layer_norm_before", True) and config.boolean("layer_norm_elementwise_affine", True)
        if not usual or config.integer("word_embed_proj_dim", width) != width:
            raise ModelError(
                f"{config.where}: norms after each layer and embeddings of another width (opt-350m) are not supported; "
                "the other sizes of OPT are."
            )
        return {
            "rope": NO_ROPE,
            "learned_positions": True,
            **layer_norms(config),
            "mlp": "plain",
            "mlp_bias": config.boolean("enable_bias"),
        }

    def names(self, config: ModelConfig) -> Names:
        positions = Piece("model.embed_positions", slice(2, 2 + config.context_length))
        names: Names = {"decoder.embed_positions": positions, **self.stated_names}
        return {**names, **{f"model.{name}": piece for name, piece in names.items()}}
