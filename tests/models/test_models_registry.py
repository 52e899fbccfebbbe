"""The registry: light to read, clear when a model is unknown, and every entry builds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig, RopeConfig
from bough.core.speech import SpeechConfig
from bough.distributed.topology import Topology
from bough.models.base import CausalLM
from bough.models.names import find_tensors
from bough.models.registry import build_model, find_family, supported_architectures

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=10,
    context_length=64,
    norm_eps=1e-5,
    rope=RopeConfig(10000.0),
)


def build(config: ModelConfig, topology: Topology | None = None) -> CausalLM:
    return build_model(config, topology or Topology(), torch.float32, torch.device("cpu"))


def test_listing_architectures_needs_no_torch() -> None:
    code = (
        "import sys, bough.models.registry as r; assert r.supported_architectures(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_model_is_made_ready_without_torchs_compiler(tiny_model: Path) -> None:
    """Importing it takes as long as all else that a start does. Whatever computes on the meta device imports it."""
    code = """
import sys
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.loader.locate import locate
settings = Settings.from_flat({"load_format": "dummy", "max_total_tokens": 64, "device": "cpu"})
build_executor(locate(sys.argv[1]), settings)
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tiny_model)], check=True)


def test_unknown_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(ModelError) as raised:
        build(replace(CONFIG, architecture="NobodysForCausalLM"))
    assert "'NobodysForCausalLM'" in str(raised.value)
    for name in supported_architectures():
        assert name in str(raised.value)


@pytest.mark.parametrize("name", supported_architectures())
def test_every_architecture_builds(name: str) -> None:
    sizes = {"encoder_layers": 1, "encoder_attention_heads": 1, "encoder_ffn_dim": 8, "max_source_positions": 4}
    sizes["num_mel_bins"] = 8
    model = build(replace(CONFIG, architecture=name, speech=SpeechConfig(sizes, 0, 1, 2)))
    assert model.config.architecture == name
    assert len({slot.name for slot in model.slots()}) > 2 * 5


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_gemma_reads_the_language_model_of_its_checkpoint(prefix: str) -> None:
    model = build(replace(CONFIG, architecture="Gemma3ForConditionalGeneration", tied_embeddings=True))
    needed = {slot.name for slot in model.slots()}
    assert "model.layers.1.pre_feedforward_layernorm.weight" in needed
    stored = {prefix + name.removeprefix("model.") for name in needed}
    found = find_tensors(find_family(model.config.architecture).names(model.config), stored, keep_others=True)
    assert found.keys() == needed
    assert {at.name for at in found.values()} == stored


def test_tied_head_shares_the_embedding() -> None:
    tied, untied = build(replace(CONFIG, tied_embeddings=True)), build(CONFIG)
    assert "lm_head.weight" not in {slot.name for slot in tied.slots()}
    assert "lm_head.weight" in {slot.name for slot in untied.slots()}
    embedding = next(slot.target for slot in tied.slots() if slot.name == "model.embed_tokens.weight")
    embedding.copy_(torch.randn(embedding.shape))
    hidden = torch.randn(3, CONFIG.hidden_size)
    torch.testing.assert_close(tied.logits(hidden), hidden @ embedding.T)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_slots_of_all_ranks_cover_each_tensor(ranks: int) -> None:
    """Targets have the shape of the part they index, and matrices are covered without gaps by the ranks together."""
    whole = {slot.name: slot.target.shape for slot in build(CONFIG).slots()}
    seen = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in whole.items()}
    for rank in range(ranks):
        for slot in build(CONFIG, Topology(rank, ranks)).slots():
            part = seen[slot.name][slot.index]
            assert part.shape == slot.target.shape
            part += 1
    assert all(bool(count.all()) for count in seen.values())
