"""The families of models that there are: those of this package (`families.toml`), each imported when it is asked for,
and those that other packages register.

A package registers a `ModelFamily` class through the entry point group `bough.models`. Its modules are imported when a
checkpoint names an architecture that is not built in. Decoders that are in neither run through `transformers`' modules.
Torch is loaded only when a model is built.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from bough.core.errors import ModelError
from bough.core.files import table_beside
from bough.core.model_config import ModelConfig
from bough.models.draft_families import NEXTN, Eagle, Eagle3, NextToken
from bough.models.family import ModelFamily
from bough.models.transformers_family import DECODERS, MULTIMODAL, TransformersFamily, usual_fields, writers

if TYPE_CHECKING:
    import torch

    from bough.distributed.group import RankGroup
    from bough.distributed.topology import Topology
    from bough.kernels.ops import PackedOps
    from bough.layers.adapters import AdapterSlots, Makers
    from bough.layers.placement import SpreadExperts, TableMaker
    from bough.layers.schemes.stored import FormOf
    from bough.models.base import CausalLM

WRITERS = writers()
FAMILIES = {  # of this package, by their first model type
    model_type: {
        "architectures": list(
            dict.fromkeys(name for of, name in WRITERS if of in (model_type, *stated.get("also", ())))
        )
        or [f"{stated['family'].partition('.')[2]}ForCausalLM"],
        **stated,
    }
    for model_type, stated in table_beside(__file__, "families.toml").items()
}
TYPES = {name for model_type, stated in FAMILIES.items() for name in (model_type, *stated.get("also", ()))}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Attributes that few families state.
STATED = ("encoder", "whole_items", "text", "block_kind", "block_options", "config_fields", "gguf_interleaved", "only")
SHARED = ("defaults", "renamed_fields", "names", "config_fields", "only")  # with the family that `like` names
GROUP = "bough.models"
FALLBACK = TransformersFamily()
DRAFTS = (Eagle(), Eagle3())  # models that cannot be served


@functools.cache
def _built_in(model_type: str) -> ModelFamily:
    own = FAMILIES[model_type]
    shared = FAMILIES[own["like"]] if "like" in own else {}
    stated = own | {part: shared.get(part, {}) | own.get(part, {}) for part in SHARED}
    stated.setdefault("encoder", next((name for name in stated["architectures"] if name.endswith(MULTIMODAL)), None))
    module, _, name = stated["family"].partition(".")
    family: type[ModelFamily] = getattr(importlib.import_module(f"bough.models.{module}"), name)
    return family(
        architectures=tuple(stated["architectures"]),
        model_types=(model_type, *stated.get("also", ())),
        gguf_architecture=_gguf_name(model_type),
        defaults=_usual(model_type, stated) | stated["defaults"],
        renamed_fields=stated["renamed_fields"],
        stated_names=stated["names"],
        gguf_stated=stated.get("gguf_stated", {}),
        read_elsewhere=functools.partial(FALLBACK.reads, model_type, stated["architectures"][0]),
        **{name: stated[name] for name in STATED if name in stated},
    )


def _usual(model_type: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    """What Transformers assumes, but for sizes, which a file must state unless they are in its `text_config`."""
    if "text" in stated:  # the family of the language model knows
        return {}
    needed = () if f"{model_type}_text" in stated.get("also", ()) else SIZES
    usual, renamed = usual_fields(model_type), stated["renamed_fields"]
    return {name: value for name, value in usual.items() if renamed.get(name, name) not in needed}


def supported_architectures() -> tuple[str, ...]:
    """The Hugging Face class names that can be served."""
    of_package = [name for stated in FAMILIES.values() for name in stated["architectures"]]
    return (*of_package, *(name for family in _registered() for name in family.architectures))


def find_family(name: str, where: str = "", impl: str = "auto") -> ModelFamily:
    """The family of an architecture, or of a config.json's model type. `where` begins the error message. `impl` is
    `--model-impl`."""
    if name in FALLBACK.architectures or impl == "transformers":
        return FALLBACK
    if name.endswith(NEXTN):
        return NextToken(find_family(name.removesuffix(NEXTN), where))
    for model_type, stated in FAMILIES.items():
        if name in (model_type, *stated.get("also", ()), *stated["architectures"]):
            return _built_in(model_type)
    for family in (*_registered(), *DRAFTS):
        if name in family.architectures or name in family.model_types:
            return family
    known, hint = ", ".join(supported_architectures()), ""
    if FALLBACK.knows(name):
        if impl == "auto":
            return FALLBACK
        hint = " --model-impl transformers may run it, more slowly."
    text = f"{where}architecture {name!r} is not supported"
    raise ModelError(f"{text}; supported are {known}. Other packages can add models (entry point group {GROUP}).{hint}")


def runs_transformers(config: ModelConfig) -> bool:
    """Whether `transformers`' modules compute the model."""
    return config.architecture in FALLBACK.architectures


def find_gguf_family(name: str, where: str = "") -> ModelFamily:
    """The family of a GGUF file's architecture."""
    known = {model_type: stored for model_type in FAMILIES if (stored := _gguf_name(model_type))}
    for model_type, stored in known.items():
        if name in stored.split():
            return _built_in(model_type)
    for family in _registered():
        if name == family.gguf_architecture:
            return family
    names = ", ".join(dict.fromkeys(" ".join(known.values()).split()))
    raise ModelError(f"{where}GGUF architecture {name!r} is not supported; supported are {names}.")


def _gguf_name(model_type: str) -> str:
    """Empty where no checkpoint writes text and is nothing more."""
    stated = FAMILIES[model_type]
    text = any(name.endswith(DECODERS) for name in stated["architectures"])
    return str(stated.get("gguf", model_type if text else ""))


def build_model(
    config: ModelConfig,
    topology: Topology,
    dtype: torch.dtype,
    device: torch.device,
    group: RankGroup | None = None,
    quantization: str = "none",
    deterministic: bool = False,
    packed_ops: PackedOps | None = None,
    form_of: FormOf | None = None,
    spread: SpreadExperts | None = None,
    adapters: AdapterSlots | None = None,
) -> CausalLM:
    """A model with memory for this rank's weights, not yet filled. More than one rank needs a `group`. With
    `packed_ops` the weights are packed for those; with `form_of`, tensors keep the forms that it names. `spread` gets
    to know the layers' experts, `adapters` those that it can change."""
    family = find_family(config.architecture)
    from bough.distributed.group import ALONE
    from bough.kernels.quant_linear.packed import of_tables
    from bough.kernels.registry import ops_for
    from bough.layers.placement import Placement, SpreadExperts
    from bough.layers.schemes.packed import PackedExperts, PackedLinear, PackedTable
    from bough.layers.schemes.plain import PlainTable, ShardedTable
    from bough.layers.schemes.stored import StoredScheme, makers_for

    ranks, latents = group or ALONE, None if adapters is None else adapters.latents
    if packed_ops is not None:
        weight = functools.partial(PackedLinear, quantization=quantization)
        packed_table = functools.partial(PackedTable, quantization=of_tables(quantization))
        makers: Makers = weight, packed_table, functools.partial(PackedExperts, quantization=quantization)
        makers = makers if adapters is None else adapters.over(*makers)
        placement = Placement(topology, dtype, device, ranks, packed_ops, *makers, make_latents=latents)
    else:
        ops = ops_for(device, deterministic)
        scheme, experts, head = makers_for(quantization)
        if form_of is not None:
            stored = StoredScheme(form_of, scheme, experts)
            scheme, experts = stored, stored.experts
        table: TableMaker = PlainTable if topology.tp_size == 1 else ShardedTable
        if adapters is not None:
            scheme, table, experts = adapters.over(scheme, table, experts)
        head = head if topology.tp_size == 1 and adapters is None else None
        spread = spread or SpreadExperts(ranks)
        placement = Placement(topology, dtype, device, ranks, ops, scheme, table, experts, spread, head, latents)
    return family.build(config, placement)


@functools.cache
def _registered() -> tuple[ModelFamily, ...]:
    """The families of other packages."""
    families = []
    for entry in entry_points(group=GROUP):
        package = entry.dist.name if entry.dist else entry.value
        try:
            family = entry.load()()
        except Exception as error:
            raise ModelError(
                f"The package {package} registers the model {entry.name!r}, which cannot be loaded "
                f"({type(error).__name__}: {error}); repair or uninstall it."
            ) from error
        if not isinstance(family, ModelFamily):
            text = f"The package {package} registers {entry.value!r} as a model"
            raise ModelError(f"{text}, which is no subclass of bough.models.family.ModelFamily.")
        families.append(family)
    return tuple(families)
