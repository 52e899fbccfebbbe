"""Granite: Llama with multipliers of embeddings, attention, what each layer adds, and logits. Granite MoE has a mixture
of experts instead of the MLP. Granite 4 has Mamba 2 in most layers, a shared expert in all, beside others or alone.

Nemotron-H: Mamba 2, attention without positions, a plain MLP, or experts without gates (Nemotron 3) in each layer, one
of them alone.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig, MoEConfig, RecurrentConfig
from bough.models.deepseek_v2 import corrected_experts
from bough.models.family import MIXTRAL_SIZES, Metadata, ModelFamily, layers_of_type, read_moe
from bough.models.fields import Fields
from bough.models.names import GGUF_MODULES, GgufNames, Names, Piece, fused, planes


class Granite(ModelFamily):
    gguf_interleaved = True

    def fields(self, config: Fields) -> dict[str, Any]:
        # Hidden states are kept divided by what multiplies all additions to them. Norms undo that, to the epsilon.
        added = config.number("residual_multiplier", 1.0)
        return {
            "embedding_scale": config.number("embedding_multiplier", 1.0) / added,
            "norm_eps": config.number("rms_norm_eps", 1e-6) / added**2,
            "query_scale": config.number("attention_multiplier", 1.0),
            "logit_scale": 1.0 / config.number("logits_scaling", 1.0),
        }


class GraniteMoe(Granite):
    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), "moe": read_moe(config, **MIXTRAL_SIZES)}

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        if "shared_expert_intermediate_size" in given:
            raise ModelError("Granite MoE with shared experts is not supported; models without them are.")
        return {}

    def names(self, config: ModelConfig) -> Names:
        assert config.moe is not None
        return expert_names(config.moe)


def expert_names(moe: MoEConfig) -> Names:
    """Where the router and the experts stand."""
    theirs, experts, inner = "model.layers.*.block_sparse_moe", moe.experts, moe.intermediate_size
    gates, ups = slice(0, inner), slice(inner, 2 * inner)
    return {
        **dict.fromkeys((f"{theirs}.router.layer", f"{theirs}.router"), "model.layers.*.mlp.gate"),
        f"{theirs}.input_linear": planes("gate_proj", experts, gates) + planes("up_proj", experts, ups),
        f"{theirs}.output_linear": planes("down_proj", experts),
    }


KINDS = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}


class GraniteMoeHybrid(Granite):
    recurrent_kind = "Mamba2"

    def fields(self, config: Fields) -> dict[str, Any]:
        position = config.text("position_embedding_type", "nope")
        if position not in ("rope", "nope"):
            raise self.refusal(config, "position_embedding_type", "supported are rope, nope")
        found, shared = super().fields(config), config.integer("shared_intermediate_size")
        recurs = layers_of_type(config, KINDS, usual=lambda layer: True)
        found["recurrent"] = mamba(config, recurs, config.integer("mamba_expand") * config.integer("hidden_size"))
        if config.count("num_local_experts"):
            found["moe"] = read_moe(config, **MIXTRAL_SIZES, shared_size=shared)
        else:
            found["intermediate_size"] = shared
        return found if position == "rope" else {**found, "rope": NO_ROPE}

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"position_embedding_type": "rope" if meta.get(".rope.scaling.finetuned", True) else "nope"}

    def gguf_names(self, config: ModelConfig) -> GgufNames:
        """Gates stand apart from what they gate there."""
        gates = {"ffn_gate": "mlp", "ffn_gate_shexp": "mlp.shared_experts"}
        apart = {f"blk.*.{name}": [Piece(f"model.layers.*.{ours}.gate_proj")] for name, ours in gates.items()}
        return {**super().gguf_names(config), **apart}

    def names(self, config: ModelConfig) -> Names:
        theirs, shared = "model.layers.*", "model.layers.*.mlp.shared_experts"
        found: dict[str, Any] = {f"{theirs}.mamba.": f"{theirs}.self_attn."}
        if config.moe is not None:
            found.update(expert_names(config.moe))
            inner = config.moe.shared_size
        else:
            shared, inner = "model.layers.*.mlp", config.intermediate_size
        parts = [f"{shared}.gate_proj", f"{shared}.up_proj"]
        return {
            **found,
            **mamba_names(config, f"{theirs}.mamba", f"{theirs}.self_attn"),
            f"{theirs}.shared_mlp.input_linear": fused(parts, (inner, inner)),
            f"{theirs}.shared_mlp.output_linear": f"{shared}.down_proj",
        }


def mamba(config: Fields, recurs: tuple[bool, ...], inner: int) -> RecurrentConfig:
    """Layers of Mamba 2, by the names that most configurations have for them."""
    heads = config.integer("mamba_n_heads")
    if inner % heads or heads % config.integer("mamba_n_groups"):
        raise ModelError(f"{config.where}: {heads} Mamba heads fit neither {inner} columns nor their groups.")
    return RecurrentConfig(
        layers=recurs,
        heads=heads,
        value_dim=inner // heads,
        conv_width=config.integer("mamba_d_conv"),
        key_heads=config.integer("mamba_n_groups"),
        key_dim=config.integer("mamba_d_state"),
        conv_bias=config.boolean("mamba_conv_bias"),
        bias=config.boolean("mamba_proj_bias"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        step_limits=_step_limits(config),
    )


def _step_limits(config: Fields) -> tuple[float, float]:
    """Two numbers; Transformers may write what JSON has no number for as an object."""
    given = config.values.get("time_step_limit") or (0.0, float("inf"))
    try:
        least, most = (float(limit["__float__"] if isinstance(limit, Mapping) else limit) for limit in given)
    except (KeyError, TypeError, ValueError):
        raise ModelError(f"{config.where}: time_step_limit must be two numbers, got {given!r}.") from None
    return least, most


def mamba_names(config: ModelConfig, theirs: str, ours: str) -> Names:
    """What one matrix holds, the gates, what is convolved, and the rates; and the convolution."""
    shape = config.recurrent
    assert shape is not None
    keys, values = shape.key_heads * shape.key_dim, shape.heads * shape.value_dim
    projections = [f"{ours}.{part}_proj" for part in ("z", "x", "b", "c", "dt")]
    convolutions = [f"{ours}.{part}_conv1d" for part in "xbc"]
    return {
        f"{theirs}.in_proj": fused(projections, (values, values, keys, keys, shape.heads)),
        f"{theirs}.conv1d": fused(convolutions, (values, keys, keys)),
    }


LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}

USUAL = {**GGUF_MODULES["common"], **GGUF_MODULES["recurrent"]}


class NemotronH(ModelFamily):
    activation_field = "mlp_hidden_act"
    block_kind, recurrent_kind = "SingleBlock", "Mamba2"
    gguf_modules: ClassVar[Mapping[str, str]] = {
        **{name: re.sub("self_attn|mlp", "mixer", ours) for name, ours in USUAL.items()},
        "blk.*.attn_norm": "model.layers.*.norm",
    }

    def read_config(self, config: Fields) -> ModelConfig:
        kinds = _kinds(config.renamed(self.renamed_fields))
        stated = {"layer_types": kinds, "layers_block_type": kinds, "num_hidden_layers": len(kinds)}
        return super().read_config(Fields(config.where, {**config.values, **stated}))

    def fields(self, config: Fields) -> dict[str, Any]:
        all_others = dict.fromkeys(LETTERS.values(), False)
        recurs, attends = (
            layers_of_type(config, {**all_others, kind: True}) for kind in ("linear_attention", "full_attention")
        )
        inner = config.integer("mamba_n_heads") * config.integer("mamba_head_dim")
        dense, moe = tuple(kind != "moe" for kind in config.values["layer_types"]), None
        if not all(dense):
            shared = config.integer("moe_shared_expert_intermediate_size")
            latent = config.optional_integer("moe_latent_size") or 0
            own: dict[str, Any] = {"gated": False, "latent_size": latent, "shared_size": shared, "dense_layers": dense}
            moe = replace(corrected_experts(config), **own)
        return {"recurrent": mamba(config, recurs, inner), "attention_layers": attends, "rope": NO_ROPE, "moe": moe}

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """A layer with a width is an MLP, or has experts. What a file says of rotation means nothing."""
        own = [f"blk.{layer}.ffn_up_exps.weight" in meta.tensors for layer in range(given["num_hidden_layers"])]
        wide = zip(own, meta.each(".feed_forward_length"), given["layer_types"], strict=True)
        kinds = ["moe" if experts else "mlp" if width else kind for experts, width, kind in wide]
        shared = given.get("shared_expert_intermediate_size")
        return {"layer_types": kinds, "partial_rotary_factor": 1.0, "moe_shared_expert_intermediate_size": shared}

    def gguf_names(self, config: ModelConfig) -> GgufNames:
        found = super().gguf_names(config).items()
        return {name: [replace(at, module=at.module.replace(".mlp.", ".mixer.")) for at in own] for name, own in found}

    def names(self, config: ModelConfig) -> Names:
        mixer = "model.layers.*.mixer"
        return {
            **mamba_names(config, mixer, mixer),
            **mamba_names(config, mixer.replace("model", "backbone"), mixer),
            **self.stated_names,
        }


def _kinds(config: Fields) -> list[str]:
    """What each layer is, by a list or by a word of one letter for each."""
    given = config.values.get("layer_types") or list(config.text("hybrid_override_pattern", ""))
    kinds = [OLD_KINDS.get(str(kind), LETTERS.get(str(kind), str(kind))) for kind in given]
    if not kinds:
        raise ModelError(f"{config.where}: layers_block_type is missing.")
    return kinds
