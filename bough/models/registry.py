"""Architectures by their Hugging Face class name. Torch is loaded only when a model is built."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

    from bough.distributed.topology import Topology
    from bough.kernels.packed_ops import PackedOps
    from bough.layers.placement import AllReduce
    from bough.models.base import CausalLM

ARCHITECTURES = {
    "Gemma3ForCausalLM": "bough.models.gemma3:Gemma3",
    "Gemma3ForConditionalGeneration": "bough.models.gemma3:Gemma3",
    "LlamaForCausalLM": "bough.models.llama:Llama",
    "MistralForCausalLM": "bough.models.llama:Llama",
    "Qwen2ForCausalLM": "bough.models.llama:Llama",
    "Qwen3ForCausalLM": "bough.models.llama:Llama",
}


def supported_architectures() -> tuple[str, ...]:
    """Names that `build_model` accepts, in order."""
    return tuple(sorted(ARCHITECTURES))


def build_model(
    config: ModelConfig,
    topology: Topology,
    dtype: torch.dtype,
    device: torch.device,
    all_reduce: AllReduce | None = None,
    quantization: str = "none",
    deterministic: bool = False,
    packed_ops: PackedOps | None = None,
) -> CausalLM:
    """A model with memory for this rank's weights, not yet filled. More than one rank needs `all_reduce`. With
    `packed_ops` the weights are packed for those."""
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(supported_architectures())
        raise ModelError(
            f"The architecture {config.architecture!r} is not supported; choose a model of one of: {known}."
        )
    from bough.kernels.registry import ops_for
    from bough.layers.placement import Placement, no_reduce
    from bough.layers.schemes.packed import PackedScheme
    from bough.layers.schemes.registry import scheme_for

    module, _, attribute = ARCHITECTURES[config.architecture].partition(":")
    reduce = all_reduce or no_reduce
    if packed_ops is not None:
        packed = PackedScheme(quantization)
        placement = Placement(topology, dtype, device, reduce, packed_ops, packed.weight, packed.table)
    else:
        ops = ops_for(device, deterministic)
        placement = Placement(topology, dtype, device, reduce, ops, scheme_for(quantization))
    model: CausalLM = getattr(importlib.import_module(module), attribute)(config, placement)
    return model
