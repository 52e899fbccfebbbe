"""Small model files for the loader's tests, and the one real model, fetched once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bough.core.model_config import ModelConfig, RopeConfig
from bough.loader import catalogue

MakeGguf = Callable[..., Path]

TINY_SHAPE = {
    "block_count": 2,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 5000.0,
}


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGguf:
    """Writes a GGUF file: the architecture's metadata, `extra` ones, and tensors (F32 unless `kinds` says else)."""

    def make(
        architecture: str = "llama",
        shape: Mapping[str, Any] = TINY_SHAPE,
        extra: Mapping[str, Any] | None = None,
        tensors: Mapping[str, np.ndarray] | None = None,
        kinds: Mapping[str, gguf.GGMLQuantizationType] | None = None,
        name: str = "tiny.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        for key, value in shape.items():
            add_metadata(writer, f"{architecture}.{key}", value)
        for key, value in (extra or {}).items():
            add_metadata(writer, key, value)
        if tensors is None:
            tensors = {"token_embd.weight": np.zeros((10, 64), np.float32)}
        for tensor, values in tensors.items():
            kind = (kinds or {}).get(tensor, gguf.GGMLQuantizationType.F32)
            data = np.ascontiguousarray(gguf.quants.quantize(values, kind))
            writer.add_tensor(tensor, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def write_json() -> Callable[[Path, Any], Path]:
    def write(path: Path, content: Any) -> Path:
        path.write_text(json.dumps(content))
        return path

    return write


@pytest.fixture
def tiny_config() -> ModelConfig:
    """The shape that `make_gguf` writes by default."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=10,
        context_length=128,
        norm_eps=1e-5,
        rope=RopeConfig(theta=5000.0),
        tied_embeddings=True,
    )


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The catalogue's default model; the first run on a machine downloads it."""
    return catalogue.pull(catalogue.DEFAULT, progress=False)
