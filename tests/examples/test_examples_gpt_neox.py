"""The example package: installed, its models answer as transformers' do, by themselves and served."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import bough
from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology
from bough.executor.native_tapes import why_not_recorded
from bough.loader.config import read_config
from bough.loader.load import load_weights, open_source
from bough.loader.locate import ModelFiles, locate
from bough.models import registry
from bough.models.registry import build_model, supported_architectures
from tests.fakes.forward import CPU, Forward

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/gpt_neox"
TOKENS = [5, 9, 60, 3, 3, 41, 17, 2, 8, 30]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip would leave: the module, and its entry points in a dist-info folder."""
    shutil.copy(EXAMPLE / "bough_gpt_neox.py", folder)
    info = folder / "bough_gpt_neox-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bough-gpt-neox\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[bough.models]\ngpt_neox = bough_gpt_neox:GptNeoX\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")]))
    registry._registered.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "site"
    folder.mkdir()
    install(folder, monkeypatch)
    yield
    registry._registered.cache_clear()
    sys.modules.pop("bough_gpt_neox", None)


def make(folder: Path, parallel: bool) -> transformers.PreTrainedModel:
    """A tiny random checkpoint, in which every weight counts."""
    torch.manual_seed(1)
    config = transformers.GPTNeoXConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=3,
        max_position_embeddings=128,
        rotary_pct=0.25,
        use_parallel_residual=parallel,
        attn_implementation="eager",
    )
    model = transformers.GPTNeoXForCausalLM(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.15)
    model.save_pretrained(folder)
    return model


def loaded(files: ModelFiles) -> tuple[ModelConfig, Forward]:
    config = read_config(files)
    model = build_model(config, Topology(), torch.float32, CPU)
    load_weights(model.slots(), open_source(files, config), progress=False, device=CPU)
    return config, Forward(model, page_size=4)


@pytest.mark.parametrize("parallel", [True, False])
def test_logits_are_those_of_transformers(installed: None, tmp_path: Path, parallel: bool) -> None:
    theirs = make(tmp_path / "model", parallel)
    config, forward = loaded(locate(str(tmp_path / "model")))
    assert (config.architecture, config.rope.partial_rotary_factor) == ("GPTNeoXForCausalLM", 0.25)
    assert "GPTNeoXForCausalLM" in supported_architectures()
    with torch.inference_mode():
        truth = theirs(torch.tensor([TOKENS])).logits[0]
    found = [forward.step({0: part})[0] for part in (TOKENS[:6], TOKENS[6:7], TOKENS[7:])]
    torch.testing.assert_close(torch.cat(found), truth, atol=1e-4, rtol=1e-4)


def test_it_is_served(installed: None, tmp_path: Path) -> None:
    """In processes of its own, on torch's executor: the native kernels have no layer norm."""
    theirs = make(tmp_path / "model", parallel=True)
    given = torch.tensor([TOKENS])
    expected = theirs.generate(given, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    with bough.Engine(model_path=str(tmp_path / "model"), skip_tokenizer_init=True, max_total_tokens=256) as engine:
        sampling = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
        answer = engine.generate(input_ids=TOKENS, sampling_params=sampling)
    assert answer["output_ids"] == expected[0, len(TOKENS) :].tolist()


def test_the_native_kernels_say_what_they_lack(installed: None, tmp_path: Path) -> None:
    make(tmp_path / "model", parallel=True)
    config = read_config(locate(str(tmp_path / "model")))
    assert "layer_norm" in (why_not_recorded(config) or "")
    llama = replace(config, architecture="LlamaForCausalLM", norm="rms", mlp="gated", activation="silu")
    whole = replace(llama, rope=replace(config.rope, partial_rotary_factor=1.0))
    assert why_not_recorded(whole) is None
    assert why_not_recorded(replace(whole, attention_sinks=True)) is not None
    assert why_not_recorded(replace(whole, logit_scale=0.5)) is not None
    assert why_not_recorded(llama) is not None  # a part of each head rotates


def test_without_the_package_it_is_unknown(tmp_path: Path) -> None:
    make(tmp_path, parallel=True)
    with pytest.raises(ModelError, match=r"'GPTNeoXForCausalLM' is not supported; .*LlamaForCausalLM.*bough\.models"):
        read_config(locate(str(tmp_path)), impl="bough")


def test_a_package_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    (tmp_path / "bough_gpt_neox.py").write_text("raise ValueError('no such layer')")
    sys.modules.pop("bough_gpt_neox", None)
    try:
        with pytest.raises(ModelError, match=r"package bough-gpt-neox .*no such layer.*uninstall"):
            supported_architectures()
    finally:
        registry._registered.cache_clear()
