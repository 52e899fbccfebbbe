"""Whisper: a decoder whose layers attend to what an encoder has heard, too. It writes down a window of sound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from bough import layers
from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig
from bough.core.speech import SpeechConfig
from bough.models.family import PLAIN, ModelFamily, layer_norms
from bough.models.fields import Fields
from bough.models.names import Names, Piece, fused

if TYPE_CHECKING:
    from bough.models.base import CausalLM

LAYER = {
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn_layer_norm": "input_layernorm",
    "encoder_attn.out_proj": "cross_attn.o_proj",
    **{f"encoder_attn.{part}_proj": f"cross_attn.{part}_proj" for part in "qkv"},
    "encoder_attn_layer_norm": "cross_attn_layernorm",
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
        "d_model": "hidden_size",
        "decoder_layers": "num_hidden_layers",
        "decoder_attention_heads": "num_attention_heads",
        "decoder_ffn_dim": "intermediate_size",
        "max_target_positions": "max_position_embeddings",
    }
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 51_865,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "activation_function": "gelu",
        "attention_bias": True,
        "tie_word_embeddings": True,
        "decoder_start_token_id": 50_257,
        "eos_token_id": 50_256,
    }

    def fields(self, config: Fields) -> dict[str, Any]:
        if config.boolean("scale_embedding"):
            raise ModelError(f"{config.where}: scale_embedding is not supported; no model of OpenAI's has it.")
        positions = config.integer("max_source_positions")
        speech = SpeechConfig(
            layers=config.integer("encoder_layers"),
            heads=config.integer("encoder_attention_heads"),
            inner=config.integer("encoder_ffn_dim"),
            mel_bins=config.integer("num_mel_bins"),
            positions=positions,
            start=config.token_ids("decoder_start_token_id")[0],
            end=config.token_ids("eos_token_id")[0],
            timestamps=config.integer("vocab_size") - positions - 1,  # one for each position, and one for the end
            suppress=config.token_ids("suppress_tokens"),
            begin_suppress=config.token_ids("begin_suppress_tokens"),
        )
        return {
            **layer_norms(config),
            "rope": NO_ROPE,
            "learned_positions": True,
            "context_length": config.integer("max_position_embeddings"),
            "mlp": "plain",
            "mlp_bias": True,
            "speech": speech,
        }

    def names(self, config: ModelConfig) -> Names:
        ours, theirs = "model.layers.*", "model.decoder.layers.*"
        return {
            **{f"{theirs}.{name}": f"{ours}.{module}" for name, module in LAYER.items()},
            "model.decoder.embed_positions": Piece("model.embed_positions", slice(0, config.context_length)),
            "model.decoder.layer_norm": "model.norm",
            "model.decoder.": "model.",
            "model.encoder.": "encoder.",
        }

    def ctranslate2_names(self, config: ModelConfig) -> Names:
        """Where the tensors stand in a file of CTranslate2's, whose projections of one input are one matrix."""
        names: dict[str, Any] = {
            "decoder.embeddings": "model.embed_tokens",
            "decoder.position_encodings.encodings": Piece(
                "model.embed_positions.weight", slice(0, config.context_length)
            ),
            "decoder.layer_norm": "model.norm",
            "encoder.position_encodings.encodings": "encoder.embed_positions.weight",
            "encoder.layer_norm": "encoder.layer_norm",
            "encoder.conv1": "encoder.conv1",
            "encoder.conv2": "encoder.conv2",
        }
        width, ours = config.hidden_size, "model.layers.*"
        for side, own in (("decoder", ours), ("encoder", "encoder.layers.*")):
            projections = [f"{own}.self_attn.{part}_proj" for part in "qkv"]
            mlp = ("mlp.up_proj", "mlp.down_proj") if own is ours else ("fc1", "fc2")
            norms = ("input_layernorm", "post_attention_layernorm")
            first, last = norms if own is ours else ("self_attn_layer_norm", "final_layer_norm")
            names |= {
                f"{side}.layers.*.self_attention.layer_norm": f"{own}.{first}",
                f"{side}.layers.*.self_attention.linear_0": fused(projections, (width,) * 3),
                f"{side}.layers.*.self_attention.linear_1": f"{own}.self_attn.{'o' if own is ours else 'out'}_proj",
                f"{side}.layers.*.ffn.layer_norm": f"{own}.{last}",
                f"{side}.layers.*.ffn.linear_0": f"{own}.{mlp[0]}",
                f"{side}.layers.*.ffn.linear_1": f"{own}.{mlp[1]}",
            }
        heard = [f"{ours}.cross_attn.{part}_proj" for part in "kv"]
        return names | {
            "decoder.layers.*.attention.layer_norm": f"{ours}.cross_attn_layernorm",
            "decoder.layers.*.attention.linear_0": f"{ours}.cross_attn.q_proj",
            "decoder.layers.*.attention.linear_1": fused(heard, (width,) * 2),
            "decoder.layers.*.attention.linear_2": f"{ours}.cross_attn.o_proj",
        }

    def build(self, config: ModelConfig, placement: layers.Placement) -> CausalLM:
        from bough.models.whisper_model import WhisperModel

        return WhisperModel(config, placement)
