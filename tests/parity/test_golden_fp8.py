"""What 8-bit weights and caches cost in accuracy, emulated on a CPU: the default model in float32, given golden tokens.

`pytest -m slow -s tests/parity/test_golden_fp8.py` prints the figures; `test_golden_fp8_gpu.py` has those of a GPU.
"""

from __future__ import annotations

import pytest
import torch

from bough.distributed.topology import Topology
from bough.loader.config import read_config
from bough.loader.load import load_weights, open_source
from bough.loader.locate import locate
from bough.models.base import CausalLM
from bough.models.registry import build_model
from tests.fakes.forward import Forward
from tests.fakes.reference_attention import ReferenceAttention
from tests.parity.golden import Golden, Sample

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SAMPLES = 4
CHUNK = 8  # what a chunk computes it reads as it is; what came before, from the cache


def load(quantization: str) -> CausalLM:
    files = locate(None)
    config = read_config(files)
    model = build_model(config, Topology(), torch.float32, CPU, quantization=quantization)
    load_weights(model.slots(), open_source(files, config), progress=False, device=CPU)
    return model


@pytest.fixture(scope="module")
def plain() -> CausalLM:
    return load("none")


@pytest.fixture(scope="module")
def exact(plain: CausalLM, golden: Golden) -> list[torch.Tensor]:
    return [forced(plain, sample, torch.float32) for sample in golden.samples[:SAMPLES]]


def forced(model: CausalLM, sample: Sample, dtype: torch.dtype) -> torch.Tensor:
    """Logprobs [outputs, vocab] at the positions of the golden output."""
    tokens = sample.prompt + sample.output
    forward = Forward(model, pages=len(tokens), rows=1, dtype=dtype)
    forward.attention = ReferenceAttention()
    chunk = CHUNK if dtype.itemsize == 1 else len(tokens)
    steps = [forward.step({0: tokens[first : first + chunk]})[0] for first in range(0, len(tokens), chunk)]
    return torch.cat(steps)[len(sample.prompt) - 1 : -1].float().log_softmax(-1)


def test_in_float32_the_best_token_is_the_golden_one(exact: list[torch.Tensor], golden: Golden) -> None:
    for sample, logprobs in zip(golden.samples[:SAMPLES], exact, strict=True):
        assert logprobs.argmax(-1).tolist() == sample.output


@pytest.mark.parametrize(
    ("quantization", "dtype", "least", "most"),
    [
        ("fp8", torch.float32, 0.89, 0.2),
        ("none", torch.float8_e4m3fn, 0.94, 0.1),
        ("none", torch.float8_e5m2, 0.89, 0.2),
    ],
)
def test_the_best_token_and_its_logprob_stay_near(
    quantization: str,
    dtype: torch.dtype,
    least: float,
    most: float,
    plain: CausalLM,
    exact: list[torch.Tensor],
    golden: Golden,
) -> None:
    model = plain if quantization == "none" else load(quantization)
    agreed, distance = [], []
    for sample, expected in zip(golden.samples[:SAMPLES], exact, strict=True):
        found, tokens = forced(model, sample, dtype), torch.tensor(sample.output)[:, None]
        agreed.append(found.argmax(-1) == tokens[:, 0])
        distance.append((found.gather(1, tokens) - expected.gather(1, tokens)).abs())
    share, off = float(torch.cat(agreed).double().mean()), float(torch.cat(distance).mean())
    print(f"weights {quantization}, cache {dtype}: best token agrees at {share:.1%}; logprobs differ by {off:.3f}")
    assert share >= least
    assert off <= most
