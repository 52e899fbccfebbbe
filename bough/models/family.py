"""A family of models: what a model file tells of its architectures. Torch-free until a model is built.

`ModelFamily` as it stands is a model like Llama. A model file subclasses it and says what differs: how its fields
become a `ModelConfig`, where its tensors stand, and the block of each layer. The names under which checkpoints announce
it and the defaults of its Transformers class are attributes too; for the families of this package a table and those
classes state them (`registry`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from bough.core.errors import ModelError
from bough.core.model_config import Activation, MediaConfig, ModelConfig, MoEConfig
from bough.models.fields import Fields
from bough.models.names import GGUF_MODULES, GGUF_SANDWICH, GgufNames, Names, gguf_names, interleaved, projections_apart
from bough.models.rope_config import read_rope, trained_context

if TYPE_CHECKING:
    from bough.layers.blocks import Block
    from bough.layers.placement import Placement
    from bough.models.base import CausalLM

GATED: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
PLAIN: dict[str, Activation] = {**GATED, "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu", "relu2": "relu2"}
DTYPES = ("float32", "float16", "bfloat16")
# How Transformers 5 writes the number of experts, and the names that families have for it.
EXPERTS_WRITTEN = tuple({"num_local_experts": name} for name in ("num_experts", "n_routed_experts"))
MIXTRAL_SIZES = {"experts": "num_local_experts", "size": "intermediate_size"}  # by the fields that Mixtral has
LAYER_TYPES = {"sliding_attention": True, "chunked_attention": True, "full_attention": False}


class Metadata(Protocol):
    """The metadata of a GGUF file; keys that begin with a dot belong to the file's architecture."""

    tensors: Mapping[str, Any]  # by their names

    def get(self, key: str, default: Any) -> Any: ...

    def need(self, key: str) -> Any: ...

    def each(self, key: str) -> list[Any]: ...  # of every layer


class ModelFamily:
    """One family. Stateless: one instance serves all its models."""

    architectures: tuple[str, ...]  # Hugging Face's class names; a `ModelConfig` has the first
    model_types: tuple[str, ...] = ()  # of config.json, where it names no architecture
    gguf_architecture: str | None = None  # llama.cpp's name for it
    defaults: ClassVar[Mapping[str, Any]] = {}  # what the Transformers class assumes where config.json is silent
    renamed_fields: ClassVar[Mapping[str, str]] = {}  # of config.json, to those that Llama has
    only: ClassVar[Mapping[str, list[Any]]] = {}  # what fields may say beside nothing, zero and false
    stated_names: ClassVar[Names] = {}  # of modules in a safetensors checkpoint, to the model's
    gguf_modules: ClassVar[Mapping[str, str]] = {}  # of the model, by names that llama.cpp gives to others elsewhere
    gguf_stated: ClassVar[Mapping[str, Any]] = {}  # fields of a config.json that all models have and no file states
    gguf_varying: tuple[str, ...] = ()  # keys of numbers that may differ between layers, of which the first is read
    gguf_interleaved = False  # whether llama.cpp rotates neighbours of heads whose halves rotate in other checkpoints
    config_type: type[ModelConfig] = ModelConfig
    activation_field = "hidden_act"
    activations: Mapping[str, Activation] | None = None  # None: those of its kind of MLP
    partial_rotation = False  # whether a part of each head may rotate
    encoder: str | None = None  # Transformers' class that has the encoders of its multi-modal checkpoints
    whole_items = False  # whether tokens of an image attend to those behind them, too
    pairs_apart = False  # whether `names` puts the coordinates that rotate as a pair half a head apart
    neighbours = False  # whether they are neighbours in its checkpoints, not of the halves of what rotates
    block_kind = "PreNormBlock"  # the class of each layer, of `bough.layers`, and what else it is given
    block_options: ClassVar[Mapping[str, Any]] = {}
    config_fields: ClassVar[Mapping[str, Any]] = {}  # of the `ModelConfig`, which are the same for all its models
    recurrent_kind: str | None = None  # the class of layers that have a state
    read_elsewhere: Callable[[str], bool] | None = None  # whether Transformers' modules for text read that field
    further_apart = False  # whether the layer for further tokens stands apart from the others, under `mtp.`

    def __init__(self, **stated: Any) -> None:
        """`stated` are the attributes above, of the families of this package (`families.toml`)."""
        for name, value in stated.items():
            setattr(self, name, value)

    def read_media(self, config: Fields) -> MediaConfig | None:
        """The encoders that a checkpoint has beside the language model; None where it has none that are used."""
        config = config.renamed(self.renamed_fields)
        kind = "image" if "vision_config" in config.values else "audio"
        encoder = config.section("vision_config" if kind == "image" else "audio_config")
        tokens = (*config.token_ids(f"{kind}_token_id"), *config.token_ids(f"{kind}_token_index"))
        if not self.encoder or encoder is None or not tokens:
            return None
        deep = len(encoder.values.get("deepstack_visual_indexes") or ())
        return MediaConfig(self.encoder, tokens[0], self.whole_items, deep_layers=deep)

    def fields(self, config: Fields) -> dict[str, Any]:
        """Fields of the `ModelConfig` that are not read as Llama's are."""
        return {}

    def names(self, config: ModelConfig) -> Names:
        """Where the tensors stand in a safetensors checkpoint; what is not named stands under the model's own name."""
        apart = projections_apart(config, neighbours=self.neighbours) if self.pairs_apart else {}
        return {**apart, **self.stated_names}

    def gguf_fields(self, meta: Metadata, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a config.json that a GGUF file of this family states by its own keys."""
        return {}

    def gguf_names(self, config: ModelConfig) -> GgufNames:
        """Where the tensors stand in a GGUF file."""
        modules = {**GGUF_MODULES["common"], **(GGUF_MODULES["recurrent"] if self.recurrent_kind else {})}
        modules |= GGUF_SANDWICH if self.block_kind == "SandwichBlock" else {}
        found = gguf_names(self.names(config), modules | dict(self.gguf_modules), config)
        if not self.gguf_interleaved:
            return found
        query, key = (f"model.layers.*.self_attn.{part}_proj" for part in "qk")
        return {
            **found,
            "blk.*.attn_q": [interleaved(query, config.num_heads, config.head_dim)],
            "blk.*.attn_k": [interleaved(key, config.num_kv_heads, config.head_dim)],
        }

    def block(self, config: ModelConfig, layer: int, placement: Placement) -> Block:
        """One layer of the model."""
        from bough import layers  # which loads torch

        options = dict(self.block_options)
        if self.recurrent_kind is not None:
            options["recurrent"] = getattr(layers, self.recurrent_kind)
        made: Block = getattr(layers, self.block_kind)(config, layer, placement, **options)
        return made

    def build(self, config: ModelConfig, placement: Placement) -> CausalLM:
        """The model, with memory for its weights."""
        from bough.models.decoder import Decoder

        return Decoder(config, placement, self.block)

    def read_config(self, config: Fields) -> ModelConfig:
        """The model's shape, from a config.json with the defaults laid under it."""
        config = config.renamed(*EXPERTS_WRITTEN, self.renamed_fields)
        for name in self.only:
            if config.values.get(name) and config.values[name] not in self.only[name]:
                raise self.refusal(config, name)
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        kv_heads = config.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelError(f"{config.where}: {heads} attention heads cannot share {kv_heads} key-value heads evenly.")
        rope, biased = read_rope(config, partial=self.partial_rotation), config.boolean("attention_bias")
        rope = replace(rope, apart=self.pairs_apart)
        common: dict[str, Any] = {
            "architecture": self.architectures[0],
            "hidden_size": hidden,
            "intermediate_size": config.integer("intermediate_size"),
            "num_layers": config.integer("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": config.optional_integer("head_dim") or hidden // heads,
            "vocab_size": config.integer("vocab_size"),
            "context_length": trained_context(config, rope),
            "norm_eps": config.number("rms_norm_eps", 1e-6),
            "rope": rope,
            "qkv_bias": biased,
            "output_bias": biased,
            "mlp_bias": config.boolean("mlp_bias"),
            "tied_embeddings": config.boolean("tie_word_embeddings"),
            "eos_token_ids": config.token_ids("eos_token_id"),
            "dtype": read_dtype(config),
        }
        found = {**common, **self.config_fields, **self.fields(config)}
        usual = PLAIN if found.get("mlp") == "plain" else GATED
        return self.config_type(**{"activation": self._activation(config, usual), **found})

    def _activation(self, config: Fields, usual: Mapping[str, Activation]) -> Activation:
        field, known = self.activation_field, self.activations or usual
        name = config.text(field, "silu")
        if name not in known:
            raise self.refusal(config, field, f"supported are {', '.join(known)}")
        return known[name]

    def refusal(self, config: Fields, name: str, others: str = "") -> ModelError:
        """Of a field's value that our layers would ignore. `others` are values that they know."""
        elsewhere = not self.recurrent_kind and self.read_elsewhere is not None and self.read_elsewhere(name)
        instead = "--model-impl transformers may run it, more slowly" if elsewhere else ""
        text = f"{config.where}: {name} = {config.values.get(name)!r:.200} is not supported"
        return ModelError("; ".join(filter(None, (text, others, instead))) + ".")


def read_moe(
    config: Fields, *, experts: str = "num_experts", size: str = "moe_intermediate_size", **routing: Any
) -> MoEConfig:
    """A mixture of experts; `experts` and `size` are the fields that have their number and the inner width of one."""
    return MoEConfig(config.integer(experts), config.integer("num_experts_per_tok"), config.integer(size), **routing)


def layer_norms(config: Fields, epsilon: str = "layer_norm_eps") -> dict[str, Any]:
    """Layer norms with biases, in place of RMS norms; `epsilon` is the field that has theirs."""
    return {"norm": "layer", "norm_bias": True, "norm_eps": config.number(epsilon, 1e-5)}


def window_fields(config: Fields, slides: Callable[[int], bool]) -> dict[str, Any]:
    """The sliding window and the layers it holds for: those that `layer_types` lists, or else those that `slides`."""
    window = config.optional_integer("sliding_window")
    if window is None:
        return {}
    sliding = layers_of_type(config, LAYER_TYPES, usual=slides)
    return {"sliding_window": window, "sliding_layers": sliding} if any(sliding) else {}


def rotating_windows(config: Fields, slides: Callable[[int], bool]) -> dict[str, Any]:
    """The same for a model whose layers rotate only where they slide."""
    windows = window_fields(config, slides)
    sliding = windows.get("sliding_layers", (False,) * config.integer("num_hidden_layers"))
    return {**windows, "unrotated_layers": tuple(not each for each in sliding)}


def layers_of_type(
    config: Fields, kinds: Mapping[str, bool], usual: Callable[[int], bool] | None = None
) -> tuple[bool, ...]:
    """Which layers are of those kinds that are true, by a list of all layers' kinds, or else the `usual` ones."""
    types, layers = config.values.get("layer_types"), config.integer("num_hidden_layers")
    if types is None and usual is not None:
        return tuple(map(usual, range(layers)))
    if not isinstance(types, list) or not set(map(str, types)) <= kinds.keys():
        raise ModelError(f"{config.where}: layer_types may hold {' and '.join(kinds)} only, got {types!r:.200}.")
    if len(types) < layers:
        raise ModelError(f"{config.where}: layer_types names {len(types)} of {layers} layers.")
    return tuple(kinds[kind] for kind in types[:layers])


def read_dtype(config: Fields) -> str:
    name = config.text("dtype", config.text("torch_dtype", "bfloat16")).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError(f"{config.where}: dtype {name!r} is not supported; supported are {', '.join(DTYPES)}.")
    return name
