"""What packed weights take is known before they are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import save_file

from bough.loader.config import read_config
from bough.loader.load import open_source, packed_size
from bough.loader.locate import ModelFiles
from bough.loader.source import SafetensorsSource
from bough.native.library import load_library
from tests.loader.conftest import MakeGguf

pytestmark = pytest.mark.skipif(load_library() is None, reason="the CPU kernels are not compiled")


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ("auto", (48 * 64 * 2 + 4 * 64, False)),
        ("none", (48 * 64 * 4 + 4 * 64, False)),
        ("int8", (48 * (64 + 4) + 4 * 64, True)),
        ("int4", (48 * (32 + 8) + 4 * 64, True)),
    ],
)
def test_of_floats(tmp_path: Path, quantization: str, expected: tuple[int, bool]) -> None:
    """Tiles have 16 rows: 33 take as much as 48."""
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.zeros(33, 64, dtype=torch.bfloat16), "norm": torch.zeros(64)}, path)
    assert packed_size(SafetensorsSource([path]), quantization) == expected


@pytest.mark.parametrize(("quantization", "row_bytes"), [("auto", 64 + 4), ("int4", 64 + 4), ("none", 256)])
def test_of_what_is_quantised_already(make_gguf: MakeGguf, quantization: str, row_bytes: int) -> None:
    tensors = {"token_embd.weight": np.zeros((16, 64), np.float32)}
    path = make_gguf(tensors=tensors, kinds={"token_embd.weight": GGMLQuantizationType.Q5_0})
    files = ModelFiles("tiny", path.parent, gguf=path)
    found = packed_size(open_source(files, read_config(files)), quantization)
    assert found == (16 * row_bytes, quantization != "none")
