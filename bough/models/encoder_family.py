"""What the families of encoders have in common. Torch-free until a model is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bough.core.model_config import ModelConfig
from bough.models.family import PLAIN, ModelFamily
from bough.models.fields import Fields
from bough.models.names import Names

if TYPE_CHECKING:
    from bough.layers.placement import Placement
    from bough.models.base import CausalLM

# What stands in a layer of BERT, by the names that the model's layers have.
BERT_LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_layernorm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "post_mlp_layernorm",
}


class EncoderFamily(ModelFamily):
    """Attention in both directions. Checkpoints may have a `prefix` before the names of the model's own modules."""

    prefix: str
    activations = PLAIN
    defaults: ClassVar[dict[str, Any]] = {"tie_word_embeddings": True}

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"causal": False, "norm": "layer", "embedding_norm": True, "final_norm": False}

    def modules(self, config: ModelConfig) -> Names:
        """Where the modules of the model itself stand, without the prefix."""
        raise NotImplementedError

    def head(self) -> Names:
        """Where the label head stands."""
        return {}

    def names(self, config: ModelConfig) -> Names:
        own = self.modules(config)
        return {**own, **{f"{self.prefix}.{name}": piece for name, piece in own.items()}, **self.head()}

    def build(self, config: ModelConfig, placement: Placement) -> CausalLM:
        from bough.models.encoder import Encoder

        return Encoder(config, placement, self.block)
