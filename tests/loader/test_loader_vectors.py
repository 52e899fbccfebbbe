"""Which checkpoints give vectors, and how they are pooled; what is not supported is said by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bough.core.errors import ModelError
from bough.core.pooling import VectorConfig
from bough.loader.vectors import generating_name, read_vectors
from bough.models.fields import Fields


def read(folder: Path, architecture: str, *, encoder: bool = False, asked: bool = False, **fields: Any) -> Any:
    config = Fields("config.json", {"architectures": [architecture], **fields})
    return read_vectors(folder, config, encoder=encoder, asked=asked)


def put_modules(folder: Path, *kinds: str, **pooling: Any) -> None:
    modules = [{"path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_the_architecture_or_the_user_says_so(tmp_path: Path) -> None:
    assert read(tmp_path, "Qwen3ForCausalLM") is read(tmp_path, "GPT2LMHeadModel") is None
    assert (
        read(tmp_path, "Qwen3ForCausalLM", asked=True) == read(tmp_path, "MistralModel") == VectorConfig("last", True)
    )
    assert read(tmp_path, "BertModel", encoder=True) == VectorConfig("mean", normalize=False)
    assert (
        generating_name("MistralModel") == generating_name("MistralForSequenceClassification") == "MistralForCausalLM"
    )


def test_classifiers_have_labels(tmp_path: Path) -> None:
    named = read(tmp_path, "BertForSequenceClassification", encoder=True, id2label={"0": "bad", "1": "good"})
    assert (named.labels, named.mode) == (("bad", "good"), "cls")
    assert read(tmp_path, "LlamaForSequenceClassification", num_labels=1).labels == ("LABEL_0",)
    for field, value in (("id2label", ["bad"]), ("num_labels", 10**9)):
        with pytest.raises(ModelError, match=f"{field} must be"):
            read(tmp_path, "LlamaForSequenceClassification", **{field: value})


@pytest.mark.parametrize(
    ("pooling", "mode"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_sentence_transformers_files_are_read(pooling: dict[str, Any], mode: str, tmp_path: Path) -> None:
    put_modules(tmp_path, "Transformer", "Pooling", "Normalize", **pooling)
    assert read(tmp_path, "Qwen3ForCausalLM") == VectorConfig(mode, True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (("Transformer", "Pooling", "Dense"), {}, "lists Dense; supported are"),
        (("Transformer", "Normalize"), {}, "lists no Pooling"),
        (("Transformer", "Pooling"), {"pooling_mode_max_tokens": True}, "mean, cls and last-token pooling"),
        (("Transformer", "Pooling"), {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "one of mean"),
    ],
)
def test_what_is_not_supported(kinds: tuple[str, ...], pooling: dict[str, Any], words: str, tmp_path: Path) -> None:
    put_modules(tmp_path, *kinds, **pooling)
    with pytest.raises(ModelError, match=words):
        read(tmp_path, "BertModel", encoder=True)


@pytest.mark.parametrize("name", ["../1_Pooling", "/1_Pooling", "1_Pooling/.."])
def test_modules_lie_in_the_models_folder(name: str, tmp_path: Path) -> None:
    put_modules(tmp_path, "Transformer", "Pooling", pooling_mode_cls_token=True)
    listed = tmp_path / "modules.json"
    listed.write_text(json.dumps([{**each, "path": name} for each in json.loads(listed.read_text())]))
    with pytest.raises(ModelError, match="a file outside of its folder"):
        read(tmp_path, "BertModel", encoder=True)


def test_a_damaged_list_of_modules(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text('{"a": 1}')
    with pytest.raises(ModelError, match=r"modules\.json cannot be read"):
        read(tmp_path, "BertModel", encoder=True)
