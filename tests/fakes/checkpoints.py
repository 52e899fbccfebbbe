"""Tiny checkpoints of random weights, in folders of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bough.loader.config import read_config
from bough.loader.locate import locate
from bough.loader.source import DummySource
from tests.conftest import TINY_LLAMA

SHAPE = {**TINY_LLAMA, "hidden_size": 64, "head_dim": 16}  # wide enough for the packed formats


def write_checkpoint(folder: Path, seed: int, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SHAPE, **config}))
    source = DummySource(read_config(locate(str(folder)), {}))
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(source.shape(name), generator=draw) * 0.2 + (1.0 if "norm" in name else 0.0)).to(dtype)
        for name in source.names()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
