"""Families of draft models: how the checkpoints of EAGLE heads are read, and where a target's layer for further tokens
stands in its own. They are found by the target's algorithm, not by what a checkpoint calls itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from bough.core.errors import ModelError
from bough.core.model_config import DraftConfig, ModelConfig
from bough.models.family import ModelFamily
from bough.models.fields import Fields
from bough.models.names import Names, pieces_of

if TYPE_CHECKING:
    from bough.layers.placement import Placement
    from bough.models.base import CausalLM

EAGLE, EAGLE3, NEXTN = "LlamaForCausalLMEagle", "LlamaForCausalLMEagle3", "NextN"  # the last behind the target's name


class Eagle(ModelFamily):
    architectures, head_kind = (EAGLE,), "EagleHead"  # the class, of `drafts`
    defaults: ClassVar[dict[str, Any]] = {"max_position_embeddings": 2048}

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"draft": DraftConfig(bias=config.boolean("fc_bias"))}

    def names(self, config: ModelConfig) -> Names:
        return {"model.": ""}

    def build(self, config: ModelConfig, placement: Placement) -> CausalLM:
        from bough.models import drafts

        made: CausalLM = getattr(drafts, self.head_kind)(config, placement)
        return made


class Eagle3(Eagle):
    architectures, head_kind = (EAGLE3,), "Eagle3Head"

    def fields(self, config: Fields) -> dict[str, Any]:
        found = super().fields(config)
        given = config.section("eagle_config")
        layers = () if given is None else given.values.get("eagle_aux_hidden_state_layer_ids") or ()
        if not all(isinstance(layer, int) for layer in layers):
            raise ModelError(f"{config.where}: eagle_aux_hidden_state_layer_ids must hold numbers, got {layers!r}.")
        taps = tuple(layer + 1 for layer in layers)  # what a layer gives is what the next one is given
        draft = replace(found["draft"], taps=taps, vocab_size=config.optional_integer("draft_vocab_size"))
        return {**found, "draft": draft}

    def names(self, config: ModelConfig) -> Names:
        inner = {f"{outer}{layer}.": "midlayer." for outer in ("model.", "") for layer in ("midlayer", "layers.*")}
        return {**inner, **super().names(config)}


# Where Qwen's checkpoints have the parts of the layer, beside what is like a layer of the target.
MTP = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}


class NextToken(ModelFamily):
    """The layer of a target of the family `inner`."""

    def __init__(self, inner: ModelFamily) -> None:
        self._inner = inner
        self.architectures = (inner.architectures[0] + NEXTN,)

    def names(self, config: ModelConfig) -> Names:
        names = self._inner.names(config)
        if not self._inner.further_apart:
            return names
        assert config.draft is not None
        every, own = "model.layers.*.", f"model.layers.{config.draft.layer}."
        parts: dict[str, Any] = {name: own + part for name, part in MTP.items()}
        for name, given in names.items():
            pieces = [replace(piece, module=piece.module.replace(every, own)) for piece in pieces_of(given)]
            parts |= {name.replace(every, "mtp.layers.*."): pieces} if name.startswith(every) else {}
        return {**names, **parts, "mtp.layers.*.": own}

    def build(self, config: ModelConfig, placement: Placement) -> CausalLM:
        from bough.models.drafts import NextTokenLayer

        return NextTokenLayer(config, placement, self._inner.block(config, 0, placement))


def next_token_config(target: ModelConfig) -> ModelConfig:
    """Of the layer behind the target's last. It is like the last: with experts, where there are some, and attention."""
    moe, latent, recurrent = target.moe, target.latent, target.recurrent
    if latent is not None and latent.index is not None:
        latent = replace(latent, index=replace(latent.index, layers=()))
    return replace(
        target,
        architecture=target.architecture + NEXTN,
        num_layers=1,
        moe=None if moe is None else replace(moe, dense_layers=()),
        latent=latent,
        recurrent=None if recurrent is None else replace(recurrent, layers=(False,)),
        media=None,
        draft=DraftConfig(layer=target.num_layers),
    )
