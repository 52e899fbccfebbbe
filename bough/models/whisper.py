"""Whisper: a decoder whose layers attend to what an encoder has heard, too. It writes down a window of sound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bough import layers
from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig
from bough.core.speech import SpeechConfig
from bough.models.family import PLAIN, ModelFamily, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, Piece

if TYPE_CHECKING:
    from bough.models.base import CausalLM

ENCODER = ("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "num_mel_bins", "max_source_positions")
LAYER = {
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn_layer_norm": "input_layernorm",
    "final_layer_norm": "post_attention_layernorm",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}


class Whisper(ModelFamily):
    architectures = ("WhisperForConditionalGeneration",)
    model_types = ("whisper",)
    activation_field = "activation_function"
    activations = PLAIN
    renamed_fields: ClassVar = {
        "d_model": "hidden_size", "decoder_layers": "num_hidden_layers", "decoder_ffn_dim": "intermediate_size",
        "decoder_attention_heads": "num_attention_heads", "max_target_positions": "max_position_embeddings",
    }  # fmt: skip
    defaults: ClassVar[dict[str, Any]] = {
        "activation_function": "gelu", "attention_bias": True, "tie_word_embeddings": True,
        "decoder_start_token_id": 50_257, "eos_token_id": 50_256,
    }  # fmt: skip

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.boolean("scale_embedding"):
            raise ModelError(f"{config.where}: scale_embedding is not supported; no model of OpenAI's has it.")
        encoder = {name: config.integer(name) for name in ENCODER}
        (start, *_), (end, *_) = map(config.token_ids, ("decoder_start_token_id", "eos_token_id"))
        timestamps = config.integer("vocab_size") - encoder["max_source_positions"] - 1  # one more for the end
        rules = map(config.token_ids, ("suppress_tokens", "begin_suppress_tokens"))
        return {
            **layer_norms(config),
            "rope": NO_ROPE,
            "learned_positions": True,
            "context_length": config.integer("max_position_embeddings"),
            "mlp": "plain",
            "mlp_bias": True,
            "speech": SpeechConfig(encoder, start, end, timestamps, *rules),
        }

    def names(self, config: ModelConfig) -> Names:
        return {
            **{f"model.decoder.layers.*.{name}": f"model.layers.*.{module}" for name, module in LAYER.items()},
            "model.decoder.embed_positions": Piece("model.embed_positions", slice(0, config.context_length)),
            "model.decoder.layer_norm": "model.norm",
            "model.decoder.": "model.",
            "model.encoder.": "encoder.",
        }

    def build(self, config: ModelConfig, placement: layers.Placement) -> CausalLM:
        from bough.models.whisper_model import WhisperModel

        return WhisperModel(config, placement)
