"""Whisper: a decoder whose layers attend to what an encoder has heard, too. It writes down a window of sound."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

from bough import layers
from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig
from bough.core.speech import SpeechConfig
from bough.models.family import ModelFamily, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, Piece

if TYPE_CHECKING:
    from bough.models.base import CausalLM

ENCODER = ("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "num_mel_bins", "max_source_positions")


class Whisper(ModelFamily):
    activation_field = "activation_function"

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.boolean("scale_embedding"):
            raise ModelError(f"{config.where}: scale_embedding is not supported; no model of OpenAI's has it.")
        encoder = {name: config.integer(name) for name in ENCODER}
        (start, *_), (end, *_) = map(config.token_ids, ("decoder_start_token_id", "eos_token_id"))
        timestamps = config.integer("vocab_size") - encoder["max_source_positions"] - 1  # one more for the end
        never, at_first = map(config.token_ids, ("suppress_tokens", "begin_suppress_tokens"))
        alignment, width = _alignment(config), config.integer("median_filter_width", 7)
        return {
            **layer_norms(config),
            "rope": replace(NO_ROPE, apart=False),  # no angles at all: on a CPU nothing is to be rotated by zero
            "context_length": config.integer("max_position_embeddings"),
            "speech": SpeechConfig(encoder, start, end, timestamps, never, at_first, alignment, width),
        }

    def names(self, config: ModelConfig) -> Names:
        positions = Piece("model.embed_positions", slice(0, config.context_length))
        return {"model.decoder.embed_positions": positions, **self.stated_names}

    def build(self, config: ModelConfig, placement: layers.Placement) -> CausalLM:
        from bough.models.whisper_model import WhisperModel

        return WhisperModel(config, placement)


def _alignment(config: Fields) -> tuple[tuple[int, int], ...]:
    """The layers and heads that show where words are: as stated, or else all of the upper half of the layers."""
    layers, heads = config.integer("decoder_layers"), config.integer("decoder_attention_heads")
    stated = config.values.get("alignment_heads") or [*product(range(layers // 2, layers), range(heads))]
    known = {(layer, head): (layer, head) for layer, head in product(range(layers), range(heads))}
    try:
        return tuple(known[layer, head] for layer, head in stated)
    except (TypeError, ValueError, KeyError):
        text = f"alignment_heads must be pairs of one of {layers} layers and one of {heads} heads, got {stated!r}."
        raise ModelError(f"{config.where}: {text}") from None
