"""MiniMax M2: experts chosen by corrected sigmoid scores, a norm over all query heads and one over all key heads; heads
rotate in part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bough.core.model_config import ModelConfig
from bough.models.family import ModelFamily, read_moe
from bough.models.fields import Fields
from bough.models.mistral import block_sparse_names
from bough.models.names import Names
from bough.models.rope_config import read_rope


class MiniMaxM2(ModelFamily):
    partial_rotation = True

    def fields(self, config: Fields) -> dict[str, Any]:
        moe = read_moe(
            config, experts="num_local_experts", size="intermediate_size", scores="sigmoid", correction_bias=True
        )
        found: dict[str, Any] = {"moe": moe, "qk_norm": True, "qk_norm_whole": True}
        rotated = config.optional_integer("rotary_dim")  # how published checkpoints say it
        if rotated is not None:
            share = rotated / config.integer("head_dim")
            found["rope"] = replace(read_rope(config, partial=True), partial_rotary_factor=share)
        return found

    def names(self, config: ModelConfig) -> Names:
        theirs, ours = "model.layers.*.block_sparse_moe", "model.layers.*.mlp.gate"
        bias = "e_score_correction_bias"
        return {**block_sparse_names(), f"{theirs}.{bias}": f"{ours}.{bias}"}
