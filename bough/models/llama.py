"""Llama, the model that other families are described against, and those that differ from it in little: windows in
three of four layers (CWM), biases on query, key and value (Seed-OSS), layers that do not rotate (SmolLM3: every fourth,
unless the checkpoint lists them), a plain MLP of squared ReLUs (Arcee, and Jais 2 with layer norms too).

ERNIE 4.5 and Helium: Llama whose heads rotate neighbours. ERNIE 4.5 MoE has shared and routed experts in a range of
its layers.

Llama 4: most layers attend within chunks of the sequence, the others to all of it and without rotating; one expert
of each token, which is given the token times its score, beside one that all pass.

Multimodal checkpoints hold the same text model, one level deeper; here it answers to text alone.

GPT-OSS: experts with biases and a clamped gate, attention with sinks; every other layer slides.
"""

from collections.abc import Mapping
from typing import Any

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig, MoEConfig
from bough.models.family import MIXTRAL_SIZES, Metadata, ModelFamily, read_moe, window_fields
from bough.models.fields import Fields
from bough.models.names import Names, Piece, Rows, fused_experts, nested, planes, projections_apart


class Llama(ModelFamily):
    gguf_interleaved = True

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """llama.cpp does not tell Mistral apart, and Mixtral only by its experts."""
        return {"architectures": ["MixtralForCausalLM"]} if meta.get(".expert_count", 0) else {}


class Cwm(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        return window_fields(config, lambda layer: layer % 4 != 0)


class SeedOss(ModelFamily):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {"output_bias": config.boolean("attention_out_bias")}


class SmolLM3(ModelFamily):
    gguf_interleaved = True

    def fields(self, config: Fields) -> dict[str, Any]:
        unrotated, slide = unrotated_layers(config), config.boolean("use_sliding_window")
        windows = window_fields(config, lambda layer: unrotated[layer]) if slide else {}
        return {"unrotated_layers": unrotated, **windows}


def unrotated_layers(config: Fields) -> tuple[bool, ...]:
    """Those for which `no_rope_layers` has a zero, or else each so-manieth."""
    count, interval = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    rotates = config.values.get("no_rope_layers") or [(layer + 1) % interval for layer in range(count)]
    if not isinstance(rotates, list) or len(rotates) < count:
        raise ModelError(f"{config.where}: no_rope_layers must list 0 or 1 for each of {count} layers.")
    return tuple(not rotates[layer] for layer in range(count))


class Ernie45(ModelFamily):
    pairs_apart = neighbours = True

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp_bias": config.boolean("use_bias") or config.boolean("mlp_bias")}


class Ernie45Moe(Ernie45):
    def fields(self, config: Fields) -> dict[str, Any]:
        inner = config.integer("moe_intermediate_size")
        moe = MoEConfig(
            experts=config.integer("moe_num_experts"),
            per_token=config.integer("moe_k"),
            intermediate_size=inner,
            correction_bias=True,
            shared_size=inner * config.count("moe_num_shared_experts"),
            dense_layers=_dense_layers(config),
        )
        return {**super().fields(config), "moe": moe, "head_bias": config.boolean("use_bias")}

    def names(self, config: ModelConfig) -> Names:
        mlp, bias = "model.layers.*.mlp", Piece("model.layers.*.mlp.gate.e_score_correction_bias", plane=0)
        stored = (f"{mlp}.{block}.e_score_correction_bias" for block in ("moe_statics", "gate.moe_statics"))
        return {**super().names(config), **dict.fromkeys(stored, bias)}


def _dense_layers(config: Fields) -> tuple[bool, ...]:
    layers, first = config.integer("num_hidden_layers"), config.count("moe_layer_start_index")
    end = config.values.get("moe_layer_end_index", -1)  # the last layer with experts; -1: of all
    last = layers - 1 if end == -1 else config.count("moe_layer_end_index")
    step = config.integer("moe_layer_interval")
    return tuple((layer + 1) % step != 0 or not first <= layer <= last for layer in range(layers))


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
