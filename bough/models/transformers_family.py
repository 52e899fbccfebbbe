"""Any text decoder that `transformers` knows: the family of models that have no file of their own. Torch-free until its
configuration is read, which takes a run of the model without weights.

Also what Transformers' sources say of models that have a file. They are read as text: to import a class of theirs takes
seconds and loads torch, in processes that need to know no more than a model's shape.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig
from bough.models.family import ModelFamily, read_dtype
from bough.models.fields import Fields

if TYPE_CHECKING:
    import torch

    from bough.layers.placement import Placement
    from bough.models.base import CausalLM

ARCHITECTURE = "TransformersForCausalLM"
MODEL_LIST = "models/auto/modeling_auto.py"
MULTIMODAL = "ForConditionalGeneration"  # how classes end that have encoders
WRITER = (
    rf'\("([^"]+)", "(\w+(?:ForCausalLM|LMHeadModel|{MULTIMODAL}))"\)'  # a model type, and a class that writes text
)
UNTYPED = ("model_type", "default_theta")  # attributes of a class that are no fields, and are read
DECODERS = ("ForCausalLM", "LMHeadModel")  # how the names of classes that write text end
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# May differ between checkpoints of one model.
NO_SHAPE = (
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "torch_dtype", "transformers_version",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TransformersConfig(ModelConfig):
    fields: str = ""  # of config.json, as JSON: what `transformers` builds the model from


class TransformersFamily(ModelFamily):
    """Slower than a family of our own: no operation is fused, and nothing is captured or recorded."""

    architectures = (ARCHITECTURE,)
    config_type = TransformersConfig

    def knows(self, architecture: str) -> bool:
        """Whether `transformers` have the class."""
        return architecture.endswith(DECODERS) and f'"{architecture}"' in transformers_source(MODEL_LIST)

    def reads(self, model_type: str, architecture: str, field: str) -> bool:
        """Whether `transformers` have the class, whose modules read that field and have no latent attention."""
        source = transformers_source(f"models/{model_type}/modeling_{model_type}.py")
        return self.knows(architecture) and f"config.{field}" in source and "kv_lora_rank" not in source

    def read_config(self, config: Fields) -> ModelConfig:
        from bough.models.transformers_model import probe

        kept = {name: value for name, value in config.values.items() if name[0] != "_" and name not in NO_SHAPE}
        given = json.dumps(kept, sort_keys=True)
        try:
            shape = probe(given)
        except ModelError as error:
            named = (config.values.get("architectures") or ["the model"])[0]
            text = f"{config.where}: {named} cannot run through transformers' modules (--model-impl transformers)"
            would = "take a model of an architecture that `bough models --supported` lists"
            raise ModelError(f"{text}, because {error}; {would}.") from error
        layers = shape.layers
        windows = {layer.window for layer in layers} - {None}
        if len(windows) > 1 or len({layer._replace(window=None) for layer in layers}) > 1:
            told = f"{config.where}: the model's layers differ in their heads or windows"
            raise ModelError(f"{told}, which --model-impl transformers does not support.")
        known = Fields(config.where, shape.config.to_dict() | dict(config.values))
        lengths = [known.optional_integer(name) for name in CONTEXT_FIELDS]
        return TransformersConfig(
            architecture=ARCHITECTURE,
            hidden_size=shape.hidden_size,
            intermediate_size=known.optional_integer("intermediate_size") or shape.hidden_size,
            num_layers=len(layers),
            num_heads=layers[0].heads,
            num_kv_heads=layers[0].kv_heads,
            head_dim=layers[0].head_dim,
            vocab_size=shape.vocab_size,
            context_length=next((length for length in lengths if length), None) or known.integer(CONTEXT_FIELDS[0]),
            norm_eps=0.0,
            rope=NO_ROPE,
            sliding_window=next(iter(windows), None),
            sliding_layers=tuple(layer.window is not None for layer in layers) if windows else (),
            attention_softcap=layers[0].softcap,
            attention_sinks=layers[0].sinks,
            eos_token_ids=known.token_ids("eos_token_id"),
            dtype=read_dtype(config),
            fields=given,
        )

    def build(self, config: ModelConfig, placement: Placement) -> CausalLM:
        from bough.models.transformers_model import TransformersModel

        assert isinstance(config, TransformersConfig)
        return TransformersModel(config, config.fields, placement.dtype, placement.device)

    def convert(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint by the names of the model's modules."""
        from bough.models.transformers_model import convert

        assert isinstance(config, TransformersConfig)
        return convert(config.fields, tensors)


def transformers_source(path: str) -> str:
    """A file of the package; empty where there is none."""
    package = find_spec("transformers")
    file = Path(package.origin).parent / path if package and package.origin else None
    return file.read_text(encoding="utf-8") if file and file.is_file() else ""


def writers() -> list[tuple[str, str]]:
    """Model types and their classes that write text, those with encoders last."""
    return sorted(re.findall(WRITER, transformers_source(MODEL_LIST)), key=lambda pair: pair[1].endswith(MULTIMODAL))


def usual_fields(model_type: str) -> dict[str, Any]:
    """What the configuration class of a model type assumes where config.json is silent; of a multimodal model, the
    class of its language model. Defaults that are computed are not among them."""
    name = model_type.replace("-", "_")
    classes: dict[str, dict[str, Any]] = {}
    for node in ast.parse(transformers_source(f"models/{name}/configuration_{name}.py")).body:
        if isinstance(node, ast.ClassDef):
            fields = dict(_constants(node))
            classes[fields.pop("model_type", "")] = fields
    found = classes.get(f"{model_type}_text", classes.get(model_type, {}))
    if isinstance(theta := found.pop("default_theta", None), float):
        found["rope_theta"] = theta
    return found


def _constants(node: ast.ClassDef) -> Iterator[tuple[str, Any]]:
    """Its fields, or the defaults of its constructor, where the first releases of Transformers 5 have them, and which
    model it is. None is left out, as it stands for what config.json need not say."""
    for each in node.body:
        named: list[tuple[str, ast.expr | None]] = []
        if isinstance(each, ast.AnnAssign):
            named = [(ast.unparse(each.target), each.value)]
        elif isinstance(each, ast.Assign):
            named = [(name, each.value) for name in map(ast.unparse, each.targets) if name in UNTYPED]
        elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
            with_default = each.args.args[len(each.args.args) - len(each.args.defaults) :]
            named = [(arg.arg, value) for arg, value in zip(with_default, each.args.defaults, strict=True)]
        for name, value in named:
            try:
                constant = None if value is None else ast.literal_eval(value)
            except ValueError:  # it is computed
                continue
            if constant is not None:
                yield name, list(constant) if isinstance(constant, tuple) else constant
