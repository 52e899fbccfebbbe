"""What each quantised format costs on the default model, as it is served on a CPU: its perplexity beside that of the
weights that it was made from. `pytest -m long -s` prints the table of docs/quantised-checkpoints.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.loader.config import read_config
from bough.loader.gguf_config import read_gguf_config
from bough.loader.load import open_source
from bough.loader.locate import locate
from bough.native.library import load_library
from tests.bench.perplexity import REFERENCE, measure, read_text
from tests.fakes.quantised import FORMATS, write_quantised

pytestmark = pytest.mark.skipif(load_library() is None, reason="the CPU kernels are not compiled")
TEXT = 6000  # characters
PLAIN: dict[str, Any] = {"max_total_tokens": 8192, "device": "cpu"}
# How much worse than the plain weights. Formats round to nearest here, without the care of the tools that have one; and
# the plain weights are those of a 4-bit GGUF, whose grid another of 4 bits misses.
EIGHT_BITS, FOUR_BITS = 1.05, 1.8


@pytest.fixture(scope="module")
def weights() -> Mapping[str, torch.Tensor]:
    files = locate(None)
    source = open_source(files, read_config(files))
    return {name: source.read(name) for name in source.names()}


@pytest.fixture(scope="module")
def config() -> Mapping[str, Any]:
    gguf = locate(None).gguf
    assert gguf is not None
    return read_gguf_config(gguf)[0]


@pytest.fixture(scope="module")
def exact() -> Iterator[float]:
    yield measure({**PLAIN, **REFERENCE}, read_text(None)[:TEXT], []).perplexity


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_perplexity_is_near_that_of_the_plain_weights(
    name: str, exact: float, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], tmp_path: Path
) -> None:
    write_quantised(tmp_path, config, weights, name)
    settings = {**PLAIN, "model_path": str(tmp_path), "tokenizer_path": str(locate(None).gguf)}
    found = measure(settings, read_text(None)[:TEXT], []).perplexity
    print(f"\n{name}: perplexity {found:.3f}, {found / exact:.4f} of {exact:.3f}")
    assert found / exact < (EIGHT_BITS if "8" in name else FOUR_BITS)
