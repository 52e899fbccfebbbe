"""The example package: installed, its models answer as transformers' do, by themselves and served."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

import bough
from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology
from bough.loader.config import read_config
from bough.loader.load import load_weights, open_source
from bough.loader.locate import ModelFiles, locate
from bough.models import registry
from bough.models.registry import build_model, supported_architectures
from tests.fakes.forward import CPU, Forward

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/gpt_bigcode"
TOKENS = [5, 9, 60, 3, 3, 41, 17, 2, 8, 30]


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What pip would leave: the module, and its entry points in a dist-info folder."""
    shutil.copy(EXAMPLE / "bough_gpt_bigcode.py", folder)
    info = folder / "bough_gpt_bigcode-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bough-gpt-bigcode\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[bough.models]\ngpt_bigcode = bough_gpt_bigcode:GptBigCode\n")
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
    sys.modules.pop("bough_gpt_bigcode", None)


def make(folder: Path, multi_query: bool) -> transformers.PreTrainedModel:
    """A tiny random checkpoint, in which every weight counts."""
    torch.manual_seed(1)
    config = transformers.GPTBigCodeConfig(
        vocab_size=97,
        n_embd=48,
        n_inner=80,
        n_layer=3,
        n_head=3,
        n_positions=128,
        multi_query=multi_query,
        attn_implementation="eager",
    )
    model = transformers.GPTBigCodeForCausalLM(config).float().eval()
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


@pytest.mark.parametrize("multi_query", [True, False])
def test_logits_are_those_of_transformers(installed: None, tmp_path: Path, multi_query: bool) -> None:
    theirs = make(tmp_path / "model", multi_query)
    config, forward = loaded(locate(str(tmp_path / "model")))
    assert (config.architecture, config.num_kv_heads) == ("GPTBigCodeForCausalLM", 1 if multi_query else 3)
    assert "GPTBigCodeForCausalLM" in supported_architectures()
    with torch.inference_mode():
        truth = theirs(torch.tensor([TOKENS])).logits[0]
    found = [forward.step({0: part})[0] for part in (TOKENS[:6], TOKENS[6:7], TOKENS[7:])]
    torch.testing.assert_close(torch.cat(found), truth, atol=1e-4, rtol=1e-4)


def test_it_is_served(installed: None, tmp_path: Path) -> None:
    """In processes of its own, on torch's executor: the native kernels have no layer norm."""
    theirs = make(tmp_path / "model", multi_query=True)
    given = torch.tensor([TOKENS])
    expected = theirs.generate(given, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    with bough.Engine(model_path=str(tmp_path / "model"), skip_tokenizer_init=True, max_total_tokens=256) as engine:
        sampling = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
        answer = engine.generate(input_ids=TOKENS, sampling_params=sampling)
    assert answer["output_ids"] == expected[0, len(TOKENS) :].tolist()


def test_without_the_package_it_is_unknown(tmp_path: Path) -> None:
    make(tmp_path, multi_query=True)
    with pytest.raises(ModelError, match=r"'GPTBigCodeForCausalLM' is not supported; .*Llama.*bough\.models"):
        read_config(locate(str(tmp_path)), impl="bough")


def test_a_package_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    (tmp_path / "bough_gpt_bigcode.py").write_text("raise ValueError('no such layer')")
    sys.modules.pop("bough_gpt_bigcode", None)
    try:
        with pytest.raises(ModelError, match=r"package bough-gpt-bigcode .*no such layer.*uninstall"):
            supported_architectures()
    finally:
        registry._registered.cache_clear()
