"""SmolLM3: Llama with layers that do not rotate, every fourth unless the checkpoint lists them."""

from __future__ import annotations

from typing import Any

from bough.core.errors import ModelError
from bough.models.family import ModelFamily, window_fields
from bough.models.fields import Fields


class SmolLM3(ModelFamily):
    architectures = ("SmolLM3ForCausalLM",)
    model_types = ("smollm3",)
    gguf_architecture = "smollm3"
    gguf_interleaved = True

    def fields(self, config: Fields) -> dict[str, Any]:
        unrotated = unrotated_layers(config)
        slide = config.boolean("use_sliding_window")
        windows = window_fields(config, lambda layer: unrotated[layer]) if slide else {}
        return {"unrotated_layers": unrotated, "mlp_bias": config.boolean("mlp_bias"), **windows}


def unrotated_layers(config: Fields) -> tuple[bool, ...]:
    """Those for which `no_rope_layers` has a zero, or else each so-manieth."""
    count, interval = config.integer("num_hidden_layers"), config.integer("no_rope_layer_interval", 4)
    rotates = config.values.get("no_rope_layers") or [(layer + 1) % interval for layer in range(count)]
    if not isinstance(rotates, list) or len(rotates) < count:
        raise ModelError(f"{config.where}: no_rope_layers must list 0 or 1 for each of {count} layers.")
    return tuple(not rotates[layer] for layer in range(count))
