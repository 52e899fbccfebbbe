"""GLM-5: DeepSeek V3.2's form, in which some layers attend to the tokens that the layer before chose."""

from __future__ import annotations

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.models.deepseek_v3 import DeepseekV32
from bough.models.fields import Fields
from bough.models.names import Names, Piece, interleaved_rows

KINDS = {"full": True, "F": True, "shared": False, "S": False}


class GlmMoeDsa(DeepseekV32):
    def choosing_layers(self, config: Fields) -> tuple[bool, ...]:
        layers, kinds = config.integer("num_hidden_layers"), config.values.get("indexer_types")
        kinds = config.values.get("index_topk_pattern") if kinds is None else kinds
        if kinds is None:
            step, first = max(config.count("index_topk_freq", 1), 1), config.count("index_skip_topk_offset", 2)
            return tuple(max(layer - first + 1, 0) % step == 0 for layer in range(layers))
        if not isinstance(kinds, (str, list)) or len(kinds) < layers or not set(map(str, kinds)) <= KINDS.keys():
            raise ModelError(
                f"{config.where}: indexer_types must say full or shared for {layers} layers, got {kinds!r}."
            )
        if not KINDS[kinds[0]]:
            raise ModelError(f"{config.where}: the first layer has no other whose choice of tokens it could share.")
        return tuple(KINDS[kind] for kind in kinds[:layers])

    def names(self, config: ModelConfig) -> Names:
        """The index rotates neighbouring pairs too, of the first coordinates of each of its heads."""
        assert config.latent is not None and config.latent.index is not None
        index, turned = config.latent.index, config.latent.rope_dim
        module = "model.layers.*.self_attn.indexer"
        heads = {"wq_b": index.heads, "wk": 1, "k_norm": 1}
        rows = {part: tuple(interleaved_rows(count, index.head_dim, slice(turned))) for part, count in heads.items()}
        return {
            **super().names(config),
            **{f"{module}.{part}": Piece(f"{module}.{part}", order) for part, order in rows.items()},
        }
