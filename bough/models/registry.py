"""Architectures by their Hugging Face class name. Torch is loaded only when a model is built."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig

if TYPE_CHECKING:
    import torch

    from bough.distributed.topology import Topology
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
) -> CausalLM:
    """A model with memory for this rank's weights, not yet filled. More than one rank needs `all_reduce`."""
    if config.architecture not in ARCHITECTURES:
        known = ", ".join(supported_architectures())
        raise ModelError(
            f"The architecture {config.architecture!r} is not supported; choose a model of one of: {known}."
        )
    from bough.kernels.ops import ops_for
    from bough.layers.placement import Placement, no_reduce
    from bough.layers.schemes.registry import scheme_for

    module, _, attribute = ARCHITECTURES[config.architecture].partition(":")
    scheme, ops = scheme_for(quantization), ops_for(device, deterministic)
    placement = Placement(topology, dtype, device, all_reduce or no_reduce, ops, scheme)
    model: CausalLM = getattr(importlib.import_module(module), attribute)(config, placement)
    return model
