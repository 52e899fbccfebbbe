"""Any text decoder that `transformers` knows: the family of models that have no file of their own. Torch-free until its
configuration is read, which takes a run of the model without weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bough.core.errors import ModelError
from bough.core.model_config import NO_ROPE, ModelConfig
from bough.models.family import ModelFamily, read_dtype
from bough.models.fields import Fields
from bough.models.transformers_source import MODEL_LIST, transformers_source

if TYPE_CHECKING:
    import torch

    from bough.layers.placement import Placement
    from bough.models.base import CausalLM

ARCHITECTURE = "TransformersForCausalLM"
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
            bos_token_id=next(iter(known.token_ids("bos_token_id")), None),
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
