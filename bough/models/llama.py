"""Llama, the model that other families are described against, and those that differ from it in little: windows in
three of four layers (CWM), biases on query, key and value (Seed-OSS), layers that do not rotate (SmolLM3: every fourth,
unless the checkpoint lists them), a plain MLP of squared ReLUs (Arcee, and Jais 2 with layer norms too)."""

from collections.abc import Mapping
from typing import Any

from bough.core.errors import ModelError
from bough.models.family import PLAIN, Metadata, ModelFamily, layer_norms, window_fields
from bough.models.fields import Fields


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


class Arcee(ModelFamily):
    gguf_interleaved = True
    activations = PLAIN

    def fields(self, config: Fields) -> dict[str, Any]:
        return {"mlp": "plain"}


class Jais2(Arcee):
    gguf_interleaved = False

    def fields(self, config: Fields) -> dict[str, Any]:
        return {**super().fields(config), **layer_norms(config)}
