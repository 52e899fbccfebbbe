"""All that models are composed of, under one name; `bough.layers` loads it when a model is built."""

from bough.attention.context import ForwardContext
from bough.layers.attention import SelfAttention
from bough.layers.blocks import Block, ParallelBlock, PostNormBlock, PreNormBlock, SandwichBlock, SingleBlock
from bough.layers.embedding import Embedding, Head
from bough.layers.linear import ColumnLinear, RowLinear
from bough.layers.mlp import GatedMLP, MoE, PlainMLP, make_mlp
from bough.layers.norm import NO_NORM, LayerNorm, RmsNorm, make_norm
from bough.layers.placement import Placement
from bough.layers.recurrent import GatedDeltaNet, KimiDelta, Mamba2, ShortConv
from bough.layers.weights import WeightSlot, slots_of

__all__ = [
    "NO_NORM", "Block", "ColumnLinear", "Embedding", "ForwardContext", "GatedDeltaNet", "GatedMLP", "Head", "KimiDelta",
    "LayerNorm", "Mamba2", "MoE", "ParallelBlock", "Placement", "PlainMLP", "PostNormBlock", "PreNormBlock", "RmsNorm",
    "RowLinear", "SandwichBlock", "SelfAttention", "ShortConv", "SingleBlock", "WeightSlot", "make_mlp", "make_norm",
    "slots_of",
]  # fmt: skip
