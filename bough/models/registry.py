"""The families of models that there are: those of this package, and those that other packages register.

A package registers a `ModelFamily` class through the entry point group `bough.models`. Its modules are imported when a
checkpoint names an architecture that is not built in. Decoders that are in neither run through `transformers`' modules.
Torch is loaded only when a model is built.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.models.arcee import Arcee, Jais2
from bough.models.cohere import Cohere, Cohere2
from bough.models.cwm import Cwm
from bough.models.deepseek_v2 import DeepseekV2
from bough.models.deepseek_v3 import DeepseekV3
from bough.models.deepseek_v32 import DeepseekV32
from bough.models.dots1 import Dots1, SolarOpen
from bough.models.ernie4_5 import Ernie45, Helium
from bough.models.ernie4_5_moe import Ernie45Moe
from bough.models.exaone4 import Exaone4
from bough.models.exaone_moe import ExaoneMoe
from bough.models.family import ModelFamily
from bough.models.gemma import Gemma, Gemma2, VaultGemma
from bough.models.gemma3 import Gemma3
from bough.models.gemma4 import Gemma4
from bough.models.glm import Glm, Glm4
from bough.models.glm4_moe import Glm4Moe
from bough.models.glm4_moe_lite import Glm4MoeLite
from bough.models.glm_moe_dsa import GlmMoeDsa
from bough.models.gpt2 import Gpt2
from bough.models.gpt_neox import GptNeoX
from bough.models.gpt_oss import GptOss
from bough.models.granite import Granite
from bough.models.granitemoe import GraniteMoe
from bough.models.granitemoehybrid import GraniteMoeHybrid
from bough.models.hunyuan import HunYuanDense
from bough.models.hunyuan_moe import HunYuanMoe
from bough.models.hy_v3 import HunYuan3
from bough.models.kimi_linear import KimiLinear
from bough.models.lfm2 import Lfm2, Lfm2Moe
from bough.models.llama import Llama
from bough.models.llama4 import Llama4
from bough.models.minimax_m2 import MiniMaxM2
from bough.models.ministral import Ministral, Ministral3, Mistral3
from bough.models.mistral import Mistral
from bough.models.mixtral import Mixtral
from bough.models.nemotron import Nemotron
from bough.models.nemotron_h import NemotronH
from bough.models.olmo import Olmo
from bough.models.olmo2 import Olmo2, Olmo3
from bough.models.olmoe import FlexOlmo, Olmoe
from bough.models.opt import Opt
from bough.models.phi import Phi
from bough.models.phi3 import Phi3
from bough.models.phimoe import PhiMoe
from bough.models.qwen2 import Qwen2
from bough.models.qwen2_moe import Qwen2Moe
from bough.models.qwen3 import Qwen3
from bough.models.qwen3_5 import Qwen35, Qwen35Moe
from bough.models.qwen3_moe import Qwen3Moe
from bough.models.qwen3_next import Qwen3Next
from bough.models.seed_oss import SeedOss
from bough.models.smollm3 import SmolLM3
from bough.models.stablelm import StableLm
from bough.models.starcoder2 import Starcoder2
from bough.models.transformers_family import ARCHITECTURE, TransformersFamily

if TYPE_CHECKING:
    import torch

    from bough.distributed.group import RankGroup
    from bough.distributed.topology import Topology
    from bough.kernels.ops import PackedOps
    from bough.layers.schemes.stored import FormOf
    from bough.models.base import CausalLM

BUILT_IN: tuple[ModelFamily, ...] = (
    *(Llama(), Mistral(), Mistral3(), Ministral(), Ministral3(), Qwen2(), Qwen3(), Gemma(), Gemma2(), Gemma3()),
    *(Gemma4(), VaultGemma(), Phi(), Phi3(), Glm(), Glm4(), Granite(), Olmo(), Olmo2(), Olmo3(), SmolLM3(), Exaone4()),
    *(SeedOss(), HunYuanDense(), Ernie45(), Cohere(), Cohere2(), Starcoder2(), Gpt2(), GptNeoX(), Opt()),
    *(StableLm(), Nemotron(), Helium(), Arcee(), Jais2(), Cwm()),
    *(Mixtral(), Llama4(), Qwen2Moe(), Qwen3Moe(), GptOss(), Glm4Moe(), Olmoe(), GraniteMoe(), PhiMoe(), HunYuanMoe()),
    *(Ernie45Moe(), MiniMaxM2(), DeepseekV2(), DeepseekV3(), Dots1(), SolarOpen(), HunYuan3(), ExaoneMoe()),
    *(DeepseekV32(), GlmMoeDsa(), Glm4MoeLite(), FlexOlmo()),
    *(Qwen3Next(), Qwen35(), Qwen35Moe(), GraniteMoeHybrid(), NemotronH(), Lfm2(), Lfm2Moe(), KimiLinear()),
)
GROUP = "bough.models"
FALLBACK = TransformersFamily()


def supported_architectures() -> tuple[str, ...]:
    """The Hugging Face class names that can be served."""
    return tuple(name for family in _families() for name in family.architectures)


def find_family(name: str, where: str = "", impl: str = "auto") -> ModelFamily:
    """The family of an architecture, or of a config.json's model type. `where` begins the error message. `impl` is
    `--model-impl`."""
    if name == ARCHITECTURE or impl == "transformers":
        return FALLBACK
    for family in _families():
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
) -> CausalLM:
    """A model with memory for this rank's weights, not yet filled. More than one rank needs a `group`. With
    `packed_ops` the weights are packed for those; with `form_of`, tensors keep the forms that it names."""
    family = find_family(config.architecture)
    from bough.distributed.group import ALONE
    from bough.kernels.registry import ops_for
    from bough.layers.placement import Placement
    from bough.layers.schemes.packed import PackedScheme
    from bough.layers.schemes.plain import PlainTable
    from bough.layers.schemes.registry import experts_for, scheme_for
    from bough.layers.schemes.sharded import ShardedTable
    from bough.layers.schemes.stored import StoredScheme

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
        table = PlainTable if topology.tp_size == 1 else ShardedTable
        meetings = (ranks.all_gather, ranks.take_over, ranks.pass_on)
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
