"""Nemotron-H: Mamba 2, attention without positions, or a plain MLP in each layer, one of them alone."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig
from bough.models.family import PLAIN, Metadata, ModelFamily, layers_of_type
from bough.models.fields import Fields
from bough.models.granite import mamba, mamba_names
from bough.models.names import GGUF_MODULES, Names

KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}

USUAL = {**GGUF_MODULES["common"], **GGUF_MODULES["recurrent"]}


class NemotronH(ModelFamily):
    activations = PLAIN
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
        all_others = dict.fromkeys(KINDS.values(), False)
        recurs, attends = (
            layers_of_type(config, {**all_others, kind: True}) for kind in ("linear_attention", "full_attention")
        )
        inner = config.integer("mamba_n_heads") * config.integer("mamba_head_dim")
        return {
            "recurrent": mamba(config, recurs, inner),
            "attention_layers": attends,
            "rope": NO_ROPE,
            "mlp": "plain",
        }

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """A layer with a width is an MLP. What a file says of rotation means nothing."""
        widths, kinds = meta.each(".feed_forward_length"), given["layer_types"]
        kinds = ["mlp" if width else kind for width, kind in zip(widths, kinds, strict=True)]
        return {"layer_types": kinds, "partial_rotary_factor": 1.0}

    def names(self, config: ModelConfig) -> Names:
        mixer = "model.layers.*.mixer"
        return {
            **mamba_names(config, mixer, mixer),
            **mamba_names(config, mixer.replace("model", "backbone"), mixer),
            **{f"{outer}.{name}": f"model.{own}" for outer in ("model", "backbone") for name, own in ENDS.items()},
            "backbone.": "model.",
        }


ENDS = {"embeddings": "embed_tokens", "norm_f": "norm"}


def _kinds(config: Fields) -> list[str]:
    """What each layer is, by a list or by a word of one letter for each."""
    given = config.values.get("layer_types") or list(config.text("hybrid_override_pattern", ""))
    kinds = [OLD_KINDS.get(str(kind), KINDS.get(str(kind), str(kind))) for kind in given]
    if "moe" in kinds:
        text = f"{config.where}: layers with experts that have no gate are not supported"
        raise ModelError(f"{text}; take a Nemotron-H without them.")
    if not kinds:
        raise ModelError(f"{config.where}: layers_block_type is missing.")
    return kinds
