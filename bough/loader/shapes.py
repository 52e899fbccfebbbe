"""Model shapes that can be served without a checkpoint, with random weights: what benchmarks compare engines on.
Torch-free.

A shape is the config.json of a public model. It is written to the cache folder when first used, so that everything else
sees an ordinary model folder.
"""

from __future__ import annotations

import json
import os
from typing import Any

from bough.core.errors import SettingsError
from bough.core.settings import ModelSettings
from bough.loader import catalogue
from bough.loader.locate import ModelFiles, locate

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "torch_dtype": "bfloat16",
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "torch_dtype": "bfloat16",
    },
}


def shape_files(name: str) -> ModelFiles:
    """The folder of a shape. Two processes that write it at once write the same."""
    folder = catalogue.home() / "shapes" / name
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    scratch = folder / f".config.{os.getpid()}"
    scratch.write_text(json.dumps(SHAPES[name], indent=1))
    scratch.replace(config)
    return ModelFiles(name=name, folder=folder, config=config)


def find_files(settings: ModelSettings) -> ModelFiles:
    """The files of the model that the settings name: a shape, or whatever `--model-path` means."""
    if settings.model_shape is None:
        return locate(settings.model_path, settings.revision)
    if settings.model_path is not None or settings.load_format not in ("auto", "dummy"):
        raise SettingsError("--model-shape has random weights: leave out --model-path and --load-format.")
    return shape_files(settings.model_shape)
