"""Shapes of public models: ordinary folders that need no checkpoint."""

from __future__ import annotations

import json

import pytest

from bough.core.errors import SettingsError
from bough.core.settings import MODEL_SHAPES, ModelSettings
from bough.loader.config import read_config
from bough.loader.locate import SHAPES, find_files


def test_every_shape_can_be_read() -> None:
    assert {path.name for path in SHAPES.iterdir()} == set(MODEL_SHAPES)
    for name in MODEL_SHAPES:
        files = find_files(ModelSettings(model_shape=name))
        config, given = read_config(files), json.loads((SHAPES / name / "config.json").read_text())
        assert files.name == name and config.hidden_size == given["hidden_size"]
        assert config.architecture == given["architectures"][0]


def test_a_shape_has_no_weights_of_its_own() -> None:
    for settings in (
        ModelSettings(model_shape="qwen3-0.6b", model_path="x"),
        ModelSettings(model_shape="qwen3-0.6b", load_format="gguf"),
    ):
        with pytest.raises(SettingsError, match="model-shape"):
            find_files(settings)
