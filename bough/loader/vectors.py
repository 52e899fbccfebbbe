"""Whether a checkpoint gives vectors in the place of text, and how: from its architecture and from the files that
sentence-transformers keeps beside it."""

import json
from pathlib import Path

from bough.core.errors import ModelError
from bough.core.pooling import PoolingMode, VectorConfig
from bough.models.fields import Fields, file_in, read_json

CLASSIFIER, REWARD = "ForSequenceClassification", "ForRewardModel"
MODES: dict[str, PoolingMode] = {
    **{f"pooling_mode_{name}": "mean" for name in ("mean", "mean_tokens")},
    **{f"pooling_mode_{name}": "cls" for name in ("cls", "cls_token")},
    "pooling_mode_lasttoken": "last",
}
MODULES = ("Transformer", "Pooling", "Normalize")
# Of a decoder's checkpoint without its head.
BARE_NAMES = {f"{name}.": f"model.{name}." for name in ("embed_tokens", "layers", "norm")} | {"score": "score.out"}


def generating_name(architecture: str) -> str:
    """The class that generates text with the same layers."""
    return architecture.removesuffix(CLASSIFIER).removesuffix(REWARD).removesuffix("Model") + "ForCausalLM"


def read_vectors(folder: Path, config: Fields, *, encoder: bool, asked: bool) -> VectorConfig | None:
    """None: the model generates text. `asked` is `--is-embedding`."""
    named = config.values.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if architecture.endswith(CLASSIFIER):
        return _classifier(config, encoder=encoder)
    if architecture.endswith(REWARD):
        return VectorConfig("last", labels=("LABEL_0",), head=("0.weight", "0.bias", "2.weight", "2.bias"))
    if (folder / "modules.json").is_file():
        return _sentence_transformer(folder / "modules.json")
    if encoder:
        return VectorConfig("mean", normalize=False)
    headless = architecture.endswith("Model") and not architecture.endswith("HeadModel")  # as in GPT2LMHeadModel
    return VectorConfig() if asked or headless else None


def _classifier(config: Fields, *, encoder: bool) -> VectorConfig:
    given = config.section("id2label")
    names = {} if given is None else given.values
    count = config.integer("num_labels", len(names) or 2)
    labels = tuple(str(names.get(str(i), f"LABEL_{i}")) for i in range(count))
    if not encoder:
        return VectorConfig("last", labels=labels, head=("out.weight",))
    pooling = config.text("classifier_pooling", "")  # of ModernBERT
    bias = ("hidden.bias",) if not pooling or config.boolean("classifier_bias") else ()
    head = ("out.weight", "out.bias", "hidden.weight", *bias, *(("norm.weight",) if pooling else ()))
    return VectorConfig("mean" if pooling == "mean" else "cls", labels=labels, head=head)


def _sentence_transformer(listed: Path) -> VectorConfig:
    """What modules.json puts behind the model."""
    try:
        kinds = {str(m["type"]).rpartition(".")[2]: str(m["path"]) for m in json.loads(listed.read_bytes())}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{listed} cannot be read ({error!r}); fetch it again.") from None
    unknown = [kind for kind in kinds if kind not in MODULES]
    if unknown or "Pooling" not in kinds:
        what = ", ".join(unknown) or "no Pooling"
        raise ModelError(f"{listed} lists {what}; supported are models of {', '.join(MODULES)}.")
    path = file_in(listed.parent, kinds["Pooling"], listed) / "config.json"
    given = read_json(path)
    chosen = [name for name, value in given.items() if name.startswith("pooling_mode_") and value is True]
    modes = [MODES.get(name) for name in chosen or [f"pooling_mode_{given.get('pooling_mode')}"]]
    if len(modes) != 1 or modes[0] is None:
        raise ModelError(f"{path}: one of mean, cls and last-token pooling is supported, not {chosen or given}.")
    return VectorConfig(modes[0], "Normalize" in kinds)
