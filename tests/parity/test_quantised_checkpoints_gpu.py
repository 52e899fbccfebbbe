"""Quantised checkpoints of the default model on a GPU: weights kept in the checkpoint's numbers score as dequantised
ones do. `pytest -m gpu -s` prints the perplexities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bough.loader.config import read_config
from bough.loader.gguf_config import read_gguf_config
from bough.loader.load import open_source
from bough.loader.locate import locate
from tests.bench.perplexity import measure, read_text
from tests.fakes.quantised import write_quantised

pytestmark = pytest.mark.gpu
SETTINGS: dict[str, Any] = {"device": "cuda", "max_total_tokens": 16_384}
FARTHEST = {"w4a16": 0.01, "w4a16-zeros": 0.01, "w4a16-64": 0.01, "awq": 0.01, "gptq": 0.01}
FARTHEST |= {"fp8-tensor": 0.05, "fp8-channel": 0.05, "fp8-blocks": 0.05}  # whose activations have 8 bits, too


@pytest.mark.parametrize("name", FARTHEST)
def test_kept_weights_score_as_dequantised_ones(name: str, tmp_path: Path) -> None:
    files = locate(None)
    assert files.gguf is not None
    source = open_source(files, read_config(files))
    weights = {tensor: source.read(tensor) for tensor in source.names()}
    write_quantised(tmp_path, read_gguf_config(files.gguf)[0], weights, name)
    settings = {**SETTINGS, "model_path": str(tmp_path), "tokenizer_path": str(files.gguf)}
    text = read_text(None)
    dequantised = measure({**settings, "quantization": "none"}, text, []).perplexity
    kept = measure(settings, text, []).perplexity
    print(f"\n{name}: {kept:.3f} kept, {dequantised:.3f} dequantised")
    assert abs(kept / dequantised - 1) < FARTHEST[name]
