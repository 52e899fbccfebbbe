"""Whether a checkpoint gives vectors in the place of text, and how: from its architecture and from the files that
sentence-transformers keeps beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bough.core.errors import ModelError
from bough.core.pooling import PoolingMode, VectorConfig
from bough.models.fields import Fields, read_json

CLASSIFIER = "ForSequenceClassification"
MODES: dict[str, PoolingMode] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean": "mean",
    "pooling_mode_cls": "cls",
}
MODULES = ("Transformer", "Pooling", "Normalize")
BARE_NAMES = {  # of a decoder's checkpoint without its head
    "embed_tokens.": "model.embed_tokens.",
    "layers.": "model.layers.",
    "norm.": "model.norm.",
    "score": "score.out",
}


def generating_name(architecture: str) -> str:
    """The class that generates text with the same layers."""
    for ending in (CLASSIFIER, "Model"):
        if architecture.endswith(ending):
            return architecture.removesuffix(ending) + "ForCausalLM"
    return architecture


def read_vectors(folder: Path, config: Fields, *, encoder: bool, asked: bool) -> VectorConfig | None:
    """None: the model generates text. `asked` is `--is-embedding`."""
    named = config.values.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if architecture.endswith(CLASSIFIER):
        return _classifier(config, encoder=encoder)
    listed = folder / "modules.json"
    if listed.is_file():
        return _sentence_transformer(listed)
    if not (encoder or asked or architecture.endswith("Model")):
        return None
    return VectorConfig("mean", normalize=False) if encoder else VectorConfig()


def _classifier(config: Fields, *, encoder: bool) -> VectorConfig:
    names: Mapping[str, Any] = config.values.get("id2label") or {}
    count = config.integer("num_labels", len(names) or 2)
    labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))
    if not encoder:
        return VectorConfig("last", normalize=False, labels=labels, label_bias=False)
    hidden = "gelu" if config.text("classifier_hidden", "tanh") == "gelu" else "tanh"
    modern = hidden == "gelu"  # ModernBERT's head
    mode: PoolingMode = "mean" if modern and config.text("classifier_pooling", "cls") == "mean" else "cls"
    bias = config.boolean("classifier_bias") if modern else True
    return VectorConfig(mode, False, labels, "gelu" if modern else "tanh", bias, modern)


def _sentence_transformer(listed: Path) -> VectorConfig:
    """What modules.json puts behind the model."""
    try:
        modules = json.loads(listed.read_bytes())
        kinds = {str(module["type"]).rpartition(".")[2]: str(module["path"]) for module in modules}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{listed} cannot be read ({error!r}); fetch it again.") from None
    unknown = [kind for kind in kinds if kind not in MODULES]
    if unknown or "Pooling" not in kinds:
        raise ModelError(
            f"{listed} lists {', '.join(unknown) or 'no Pooling'}; supported are models of {', '.join(MODULES)}."
        )
    path = listed.parent / kinds["Pooling"] / "config.json"
    given = read_json(path)
    chosen = [name for name, value in given.items() if name.startswith("pooling_mode_") and value is True]
    named = [MODES.get(name) for name in chosen or [f"pooling_mode_{given.get('pooling_mode')}"]]
    if len(named) != 1 or named[0] is None:
        raise ModelError(f"{path}: one of mean, cls and last-token pooling is supported, not {chosen or given}.")
    return VectorConfig(named[0], "Normalize" in kinds)
