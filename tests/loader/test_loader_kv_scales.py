"""Scales of an 8-bit cache from checkpoints of several makers, and from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bough.core.errors import ModelError, SettingsError
from bough.loader.kv_scales import checkpoint_scales, file_scales
from bough.loader.source import SafetensorsSource


def source_with(folder: Path, **values: torch.Tensor) -> SafetensorsSource:
    tensors = {f"model.layers.{name.replace('__', '.')}": value for name, value in values.items()}
    save_file({"model.norm.weight": torch.ones(4), **tensors}, folder / "model.safetensors")
    return SafetensorsSource([folder / "model.safetensors"])


def test_every_layer_has_its_own_wherever_they_are_kept(tmp_path: Path) -> None:
    source = source_with(
        tmp_path,
        **{
            "0__self_attn__k_scale": torch.tensor(0.5),
            "0__self_attn__v_scale": torch.tensor([0.25]),
            "1__self_attn__k_proj__k_scale": torch.tensor([2.0], dtype=torch.bfloat16),
            "1__self_attn__v_proj__v_scale": torch.tensor(3.0),
            "2__self_attn__attn__k_scale": torch.tensor(4.0),
        },
    )
    assert checkpoint_scales(source, 4) == [(0.5, 0.25), (2.0, 3.0), (4.0, 1.0), (1.0, 1.0)]


@pytest.mark.parametrize("value", [torch.tensor(0.0), torch.tensor(float("nan")), torch.ones(2)])
def test_a_checkpoint_with_a_useless_scale_is_refused(tmp_path: Path, value: torch.Tensor) -> None:
    source = source_with(tmp_path, **{"0__self_attn__k_scale": value})
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.k_scale must be one number above 0"):
        checkpoint_scales(source, 1)


def test_a_file_has_one_number_for_a_layer_of_a_rank(tmp_path: Path) -> None:
    path = tmp_path / "scales.json"
    factors = {"0": {"0": 0.5, "1": 2}, "1": {"0": 7.0, "1": 8.0}}
    path.write_text(json.dumps({"model_type": "llama", "kv_cache": {"dtype": "x", "scaling_factor": factors}}))
    assert file_scales(str(path), 2) == [(0.5, 0.5), (2.0, 2.0)]
    assert file_scales(str(path), 1, rank=1) == [(7.0, 7.0)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "must hold"),
        ("[]", "must hold"),
        ('{"kv_cache": {"scaling_factor": {"0": {"0": 1.0}}}}', "each of the 2 layers"),
        ('{"kv_cache": {"scaling_factor": {"0": {"0": 1.0, "1": -1.0}}}}', "layer 1 has -1.0"),
    ],
)
def test_a_file_that_does_not_fit_says_why(tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "scales.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        file_scales(str(path), 2)
