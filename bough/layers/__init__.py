"""The blocks that models are composed of, each holding this rank's share of its weights.

Layers are plain objects: they allocate their tensors when made, say through `slots` which tensors fill them, and are
called. They hold no state of a request; what a step needs comes with the forward context, which every layer gets.

`from bough import layers` loads no torch, so that a model file can be read without it; the first use of a layer does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bough.attention.context import ForwardContext as ForwardContext
    from bough.layers.attention import SelfAttention as SelfAttention
    from bough.layers.blocks import Block as Block
    from bough.layers.blocks import ParallelBlock as ParallelBlock
    from bough.layers.blocks import PreNormBlock as PreNormBlock
    from bough.layers.blocks import SandwichBlock as SandwichBlock
    from bough.layers.blocks import SingleBlock as SingleBlock
    from bough.layers.embedding import Embedding as Embedding
    from bough.layers.embedding import Head as Head
    from bough.layers.gated_delta_net import GatedDeltaNet as GatedDeltaNet
    from bough.layers.kimi_delta import KimiDelta as KimiDelta
    from bough.layers.linear import ColumnLinear as ColumnLinear
    from bough.layers.linear import RowLinear as RowLinear
    from bough.layers.mamba2 import Mamba2 as Mamba2
    from bough.layers.mlp import GatedMLP as GatedMLP
    from bough.layers.mlp import PlainMLP as PlainMLP
    from bough.layers.moe import MoE as MoE
    from bough.layers.moe import make_mlp as make_mlp
    from bough.layers.norm import NO_NORM as NO_NORM
    from bough.layers.norm import LayerNorm as LayerNorm
    from bough.layers.norm import RmsNorm as RmsNorm
    from bough.layers.norm import make_norm as make_norm
    from bough.layers.placement import Placement as Placement
    from bough.layers.short_conv import ShortConv as ShortConv
    from bough.layers.weights import WeightSlot as WeightSlot
    from bough.layers.weights import slots_of as slots_of

_HOMES = {
    "ForwardContext": "bough.attention.context",
    "SelfAttention": "bough.layers.attention",
    **dict.fromkeys(("Block", "PreNormBlock", "ParallelBlock", "SandwichBlock", "SingleBlock"), "bough.layers.blocks"),
    **dict.fromkeys(("Embedding", "Head"), "bough.layers.embedding"),
    "GatedDeltaNet": "bough.layers.gated_delta_net",
    "KimiDelta": "bough.layers.kimi_delta",
    "Mamba2": "bough.layers.mamba2",
    "ShortConv": "bough.layers.short_conv",
    **dict.fromkeys(("ColumnLinear", "RowLinear"), "bough.layers.linear"),
    **dict.fromkeys(("GatedMLP", "PlainMLP"), "bough.layers.mlp"),
    **dict.fromkeys(("MoE", "make_mlp"), "bough.layers.moe"),
    **dict.fromkeys(("LayerNorm", "NO_NORM", "RmsNorm", "make_norm"), "bough.layers.norm"),
    "Placement": "bough.layers.placement",
    **dict.fromkeys(("WeightSlot", "slots_of"), "bough.layers.weights"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bough.layers' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
