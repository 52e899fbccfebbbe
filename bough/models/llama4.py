"""Llama 4: most layers attend within chunks of the sequence, the others to all of it and without rotating; one expert
of each token, which is given the token times its score, beside one that all pass.

Multimodal checkpoints hold the same text model, one level deeper; here it answers to text alone.
"""

from collections.abc import Mapping
from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig, MoEConfig
from bough.models.family import MIXTRAL_SIZES, Metadata, ModelFamily, read_moe, window_fields
from bough.models.fields import Fields
from bough.models.llama import unrotated_layers
from bough.models.names import Names, fused_experts, nested, projections_apart

GGUF_UNNORMED = 128  # experts of the one whose heads have no norms


class Llama4(ModelFamily):
    pairs_apart = True

    def fields(self, config: Fields) -> dict[str, Any]:
        unrotated, step = unrotated_layers(config), config.integer("interleave_moe_layer_step")
        sparse, layers = config.token_ids("moe_layers"), range(len(unrotated))
        dense = tuple(layer not in sparse if sparse else (layer + 1) % step != 0 for layer in layers)
        grows = bool(config.values["attn_temperature_tuning"])  # some files have a number there
        return {
            "intermediate_size": config.integer("intermediate_size_mlp"),
            "moe": _experts(config, dense),
            "qk_unit_norm": config.boolean("use_qk_norm"),
            "query_growth": (config.number("attn_scale"), config.integer("floor_scale"), 1) if grows else None,
            "unrotated_layers": unrotated,
            "chunked": True,
            **window_fields(config, lambda layer: not unrotated[layer]),
        }

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """The file has other names for the widths, and no word of what the published models have."""
        return {
            "intermediate_size_mlp": given["intermediate_size"],
            "intermediate_size": given["moe_intermediate_size"],
            "use_qk_norm": given["num_local_experts"] != GGUF_UNNORMED,
        }

    def names(self, config: ModelConfig) -> Names:
        theirs, ours = "model.layers.*.feed_forward", "model.layers.*.mlp"
        others = {f"{theirs}.shared_expert.": f"{ours}.shared_experts.", f"{theirs}.": f"{ours}."}
        assert config.moe is not None
        experts = fused_experts(f"{theirs}.experts", config.moe, transposed=True)
        heads = projections_apart(config, neighbours=True)
        return nested({**heads, **experts, f"{theirs}.router": f"{ours}.gate", **others})


def _experts(config: Fields, dense: tuple[bool, ...]) -> MoEConfig:
    if config.integer("num_experts_per_tok") != 1:
        raise ModelError(f"{config.where}: num_experts_per_tok must be 1, as in the models that there are.")
    return read_moe(
        config,
        **MIXTRAL_SIZES,
        scores="sigmoid",
        renormalise=False,
        scales_inputs=True,
        shared_size=config.integer("intermediate_size"),
        dense_layers=dense if any(dense) else (),
    )
