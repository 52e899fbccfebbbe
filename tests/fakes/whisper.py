"""Tiny random Whisper models, as checkpoints of Transformers' and as files of CTranslate2's."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
import transformers

POSITIONS = 30  # of the encoder: windows of 60 frames
VOCABULARY = 120
START, END = (
    81,
    80,
)  # text is below; times are the last 31 of the vocabulary, the one before them says that there are none
SUPPRESS, BEGIN_SUPPRESS = [3, 4, START], [7, END]


def tiny_whisper(folder: Path) -> transformers.WhisperForConditionalGeneration:
    """The model, saved to the folder; weights are large enough for lively logits."""
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_layers=3,
        decoder_attention_heads=2,
        decoder_ffn_dim=56,
        num_mel_bins=80,
        max_source_positions=POSITIONS,
        max_target_positions=64,
        decoder_start_token_id=START,
        eos_token_id=END,
        pad_token_id=END,
        bos_token_id=END,
        suppress_tokens=SUPPRESS,
        begin_suppress_tokens=BEGIN_SUPPRESS,
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            scale = 0.1 if "embed_tokens" in name else 0.9 if "encoder_attn" in name else 0.3
            tensor.copy_(torch.randn(tensor.shape) * (scale if tensor.dim() > 1 else 0.5))
    model.generation_config.suppress_tokens = SUPPRESS
    model.generation_config.begin_suppress_tokens = BEGIN_SUPPRESS
    model.save_pretrained(folder)
    return model


def random_features(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(80, 2 * POSITIONS)).astype(np.float32)


def ctranslate2_tensors(model: transformers.WhisperForConditionalGeneration) -> dict[str, np.ndarray]:
    """The tensors of a model by CTranslate2's names: those of one input are stacked, and keys have a bias of zeros."""
    state = {name: tensor.detach().numpy() for name, tensor in model.model.state_dict().items()}
    found: dict[str, np.ndarray] = {}

    def put(name: str, *modules: str) -> None:
        weights = [state[f"{module}.weight"] for module in modules]
        norm = name.endswith("layer_norm")
        found[f"{name}/{'gamma' if norm else 'weight'}"] = np.concatenate(weights)
        biases = [
            state.get(f"{module}.bias", np.zeros(len(weight), np.float32))
            for module, weight in zip(modules, weights, strict=True)
        ]
        found[f"{name}/{'beta' if norm else 'bias'}"] = np.concatenate(biases)

    for side, part in (("encoder", model.model.encoder), ("decoder", model.model.decoder)):
        found[f"{side}/num_heads"] = np.array(getattr(model.config, f"{side}_attention_heads"), dtype=np.int16)
        found[f"{side}/position_encodings/encodings"] = state[f"{side}.embed_positions.weight"]
        put(f"{side}/layer_norm", f"{side}.layer_norm")
        for number in range(len(part.layers)):
            ours, theirs = f"{side}/layer_{number}", f"{side}.layers.{number}"
            put(f"{ours}/self_attention/layer_norm", f"{theirs}.self_attn_layer_norm")
            put(f"{ours}/self_attention/linear_0", *(f"{theirs}.self_attn.{each}_proj" for each in "qkv"))
            put(f"{ours}/self_attention/linear_1", f"{theirs}.self_attn.out_proj")
            put(f"{ours}/ffn/layer_norm", f"{theirs}.final_layer_norm")
            put(f"{ours}/ffn/linear_0", f"{theirs}.fc1")
            put(f"{ours}/ffn/linear_1", f"{theirs}.fc2")
            if side == "decoder":
                put(f"{ours}/attention/layer_norm", f"{theirs}.encoder_attn_layer_norm")
                put(f"{ours}/attention/linear_0", f"{theirs}.encoder_attn.q_proj")
                put(f"{ours}/attention/linear_1", *(f"{theirs}.encoder_attn.{each}_proj" for each in "kv"))
                put(f"{ours}/attention/linear_2", f"{theirs}.encoder_attn.out_proj")
    put("encoder/conv1", "encoder.conv1")
    put("encoder/conv2", "encoder.conv2")
    found["decoder/embeddings/weight"] = state["decoder.embed_tokens.weight"]
    return found


def write_ctranslate2(path: Path, tensors: dict[str, np.ndarray], kind: str = "WhisperSpec") -> None:
    types = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}

    def text(value: str) -> bytes:
        return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"

    parts = [struct.pack("<I", 6), text(kind), struct.pack("<II", 3, len(tensors))]
    for name, tensor in tensors.items():
        shape = struct.pack(f"<B{tensor.ndim}I", tensor.ndim, *tensor.shape)
        parts += [text(name), shape, struct.pack("<BI", types[tensor.dtype.name], tensor.nbytes), tensor.tobytes()]
    path.write_bytes(b"".join([*parts, struct.pack("<I", 0)]))
