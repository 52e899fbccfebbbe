"""Shapes of public models: ordinary folders that need no checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.core.errors import SettingsError
from bough.core.settings import MODEL_SHAPES, ModelSettings
from bough.loader.config import read_config
from bough.loader.shapes import SHAPES, find_files


def test_every_shape_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path))
    assert tuple(SHAPES) == MODEL_SHAPES
    for name, given in SHAPES.items():
        files = find_files(ModelSettings(model_shape=name))
        config = read_config(files)
        assert files.name == name and config.hidden_size == given["hidden_size"]
        assert config.architecture == given["architectures"][0]
    assert not list(tmp_path.rglob(".config.*")), "nothing is left of the writing"


def test_a_shape_has_no_weights_of_its_own() -> None:
    for settings in (
        ModelSettings(model_shape="qwen3-0.6b", model_path="x"),
        ModelSettings(model_shape="qwen3-0.6b", load_format="gguf"),
    ):
        with pytest.raises(SettingsError, match="model-shape"):
            find_files(settings)
