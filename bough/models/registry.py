"""The families of models that there are: those of this package, and those that other packages register.

A package registers a `ModelFamily` class through the entry point group `bough.models`. Its modules are imported when a
checkpoint names an architecture that is not built in. Decoders that are in neither run through `transformers`' modules.
Torch is loaded only when a model is built.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.models.draft_families import NEXTN, Eagle, Eagle3, NextToken
from bough.models.family import ModelFamily
from bough.models.transformers_family import ARCHITECTURE, TransformersFamily

if TYPE_CHECKING:
    import torch

    from bough.distributed.group import RankGroup
    from bough.distributed.topology import Topology
    from bough.kernels.ops import PackedOps
    from bough.layers.adapters import AdapterSlots
    from bough.layers.schemes.stored import FormOf
    from bough.layers.spread import SpreadExperts
    from bough.models.base import CausalLM

MODULES = (  # each has one family or several
    "llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma3", "gemma4", "phi", "phi3", "glm", "granite",
    "olmo", "olmo2", "smollm3", "exaone4", "seed_oss", "hunyuan", "ernie4_5", "cohere", "starcoder2", "gpt2",
    "gpt_neox", "opt", "stablelm", "nemotron", "arcee", "cwm", "mixtral", "llama4", "qwen2_moe", "qwen3_moe",
    "gpt_oss", "glm4_moe", "olmoe", "granitemoe", "phimoe", "hunyuan_moe", "ernie4_5_moe", "minimax_m2", "deepseek_v2",
    "deepseek_v3", "dots1", "hy_v3", "exaone_moe", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "qwen3_next",
    "qwen3_5", "granitemoehybrid", "nemotron_h", "lfm2", "kimi_linear", "bert", "roberta", "nomic_bert", "modernbert",
    "whisper",
)  # fmt: skip
GROUP = "bough.models"
FALLBACK = TransformersFamily()
DRAFTS = (Eagle(), Eagle3())  # models that cannot be served


def _families_in(module: str) -> Iterator[ModelFamily]:
    for kind in vars(importlib.import_module(f"bough.models.{module}")).values():
        if isinstance(kind, type) and issubclass(kind, ModelFamily) and kind.__module__.endswith(f".{module}"):
            yield kind()


BUILT_IN = tuple(family for module in MODULES for family in _families_in(module))


def supported_architectures() -> tuple[str, ...]:
    """The Hugging Face class names that can be served."""
    return tuple(name for family in _families() for name in family.architectures)


def find_family(name: str, where: str = "", impl: str = "auto") -> ModelFamily:
    """The family of an architecture, or of a config.json's model type. `where` begins the error message. `impl` is
    `--model-impl`."""
    if name == ARCHITECTURE or impl == "transformers":
        return FALLBACK
    if name.endswith(NEXTN):
        return NextToken(find_family(name.removesuffix(NEXTN), where))
    for family in (*_families(), *DRAFTS):
        if name in family.architectures or name in family.model_types:
            return family
    known, hint = ", ".join(supported_architectures()), ""
    if FALLBACK.knows(name):
        if impl == "auto":
            return FALLBACK
        hint = " --model-impl transformers may run it, more slowly."
    raise ModelError(
        f"{where}architecture {name!r} is not supported; supported are {known}. Other packages can add models "
        f"(entry point group {GROUP}).{hint}"
    )


def runs_transformers(config: ModelConfig) -> bool:
    """Whether `transformers`' modules compute the model."""
    return config.architecture == ARCHITECTURE


def find_gguf_family(name: str, where: str = "") -> ModelFamily:
    """The family of a GGUF file's architecture."""
    for family in _families():
        if name == family.gguf_architecture:
            return family
    known = dict.fromkeys(family.gguf_architecture for family in _families() if family.gguf_architecture)
    raise ModelError(f"{where}GGUF architecture {name!r} is not supported; supported are {', '.join(known)}.")


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
    from bough.distributed.group import ALONE, AttentionGroup
    from bough.kernels.registry import ops_for
    from bough.layers.placement import Placement
    from bough.layers.schemes.packed import PackedScheme
    from bough.layers.schemes.plain import PlainTable
    from bough.layers.schemes.registry import experts_for, scheme_for
    from bough.layers.schemes.sharded import ShardedTable
    from bough.layers.schemes.stored import StoredScheme
    from bough.layers.spread import SpreadExperts

    ranks = group or ALONE
    reduce = ranks.all_reduce
    if packed_ops is not None:
        packed = PackedScheme(quantization)
        placement = Placement(topology, dtype, device, reduce, packed_ops, packed.weight, packed.table, packed.experts)
    else:
        ops = ops_for(device, deterministic)
        scheme, experts = scheme_for(quantization), experts_for(quantization)
        if form_of is not None:
            stored = StoredScheme(form_of, scheme, experts)
            scheme, experts = stored, stored.experts
        if adapters is not None:
            scheme = adapters.over(scheme)
        table = PlainTable if topology.tp_size == 1 else ShardedTable
        spread = spread or SpreadExperts(ranks)
        attending = ranks if isinstance(ranks, AttentionGroup) else None
        meetings = (ranks.all_gather, spread, ranks.take_over, ranks.pass_on, attending)
        placement = Placement(topology, dtype, device, reduce, ops, scheme, table, experts, *meetings)
    return family.build(config, placement)


def _families() -> Iterator[ModelFamily]:
    yield from BUILT_IN
    yield from _registered()


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
            raise ModelError(
                f"The package {package} registers {entry.value!r} as a model, which is no subclass of "
                "bough.models.family.ModelFamily."
            )
        families.append(family)
    return tuple(families)
