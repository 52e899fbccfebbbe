"""GPT-OSS: experts with biases and a clamped gate, attention with sinks; every other layer slides."""

from collections.abc import Mapping
from typing import Any

from bough.core.model_config import ModelConfig
from bough.models.family import MIXTRAL_SIZES, Metadata, ModelFamily, read_moe, window_fields
from bough.models.fields import Fields
from bough.models.names import Names, Piece, Rows, planes


class GptOss(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        gate = (config.number("swiglu_alpha"), config.number("swiglu_limit"))
        moe = read_moe(config, **MIXTRAL_SIZES, biases=True, clamped_gate=gate)
        return {"moe": moe, "attention_sinks": True, **window_fields(config, lambda layer: layer % 2 == 0)}

    def names(self, config: ModelConfig) -> Names:
        """Gates and ups take turns; matrices are stored by their inputs."""
        assert config.moe is not None
        experts, width = config.moe.experts, 2 * config.moe.intermediate_size

        def both(part: str, rows: Rows | None = None) -> tuple[list[Piece], list[Piece]]:
            return planes(f"{part}.weight", experts, rows, transposed=True), planes(f"{part}.bias", experts, rows)

        gates, gate_biases = both("gate_proj", tuple(range(0, width, 2)))
        ups, up_biases = both("up_proj", tuple(range(1, width, 2)))
        downs, down_biases = both("down_proj")
        return {
            "model.layers.*.mlp.router": "model.layers.*.mlp.gate",
            "model.layers.*.mlp.experts.gate_up_proj": gates + ups,
            "model.layers.*.mlp.experts.gate_up_proj_bias": gate_biases + up_biases,
            "model.layers.*.mlp.experts.down_proj": downs,
            "model.layers.*.mlp.experts.down_proj_bias": down_biases,
        }

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        inner = given.get("moe_intermediate_size", given["intermediate_size"])
        return {"intermediate_size": inner, "rope_scaling": {**(given["rope_scaling"] or {}), "truncate": False}}
