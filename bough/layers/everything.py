"""All that models are composed of, under one name; `bough.layers` loads it when a model is built."""

from __future__ import annotations

from bough.attention.context import ForwardContext as ForwardContext
from bough.layers.attention import SelfAttention as SelfAttention
from bough.layers.blocks import Block as Block
from bough.layers.blocks import ParallelBlock as ParallelBlock
from bough.layers.blocks import PostNormBlock as PostNormBlock
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
