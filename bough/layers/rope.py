"""Rotary embedding: the angles of each position, for every way of stretching a context that checkpoints use.

Everything is computed once, when a model is built, in float32 as transformers does, so that both rotate alike; kernels
look their positions up in the table.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from bough.core.errors import ModelError
from bough.core.model_config import RopeConfig


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosine and sine of every position's angles, float32 [context, rotary_dim / 2]; where pairs stand apart, those
    that do not rotate have an angle of zero. [context, head_dim / 2]"""

    cos: torch.Tensor
    sin: torch.Tensor
    axes: torch.Tensor | None = None  # [rotary_dim / 2] int64, by which of a token's positions each pair rotates


def rope_table(config: RopeConfig, head_dim: int, context_length: int, device: torch.device) -> RopeTable:
    """Angles for the whole context, computed where they are needed: a long context takes tens of megabytes."""
    if config.short_factors is not None and context_length <= config.original_context:
        config = replace(config, factors=config.short_factors)
    shape = device.type == "meta"  # of one row: computing there would import torch's compiler, half of a start's work
    positions = torch.arange(1 if shape else context_length, dtype=torch.float32, device="cpu" if shape else device)
    # A proportional rotation is that of the whole head, of which the slower pairs stand still.
    share = 1.0 if config.kind == "proportional" else config.partial_rotary_factor
    radians = frequencies(config, int(head_dim * share))[: config.rotary_dim(head_dim) // 2]
    turned = torch.outer(positions, radians.to(positions.device))
    scale, still = magnitude(config), head_dim // 2 - turned.shape[1] if config.apart else 0
    axes, sections = None, config.sections
    if sections is not None and config.alternating:
        axes = torch.zeros(turned.shape[1], dtype=torch.int64)
        for axis, size in enumerate(sections[1:], 1):
            axes[axis : size * len(sections) : len(sections)] = axis
    elif sections is not None:
        assert sum(sections) == turned.shape[1], "every pair of coordinates belongs to one section"
        axes = torch.repeat_interleave(torch.arange(len(sections)), torch.tensor(sections))
    axes = None if axes is None else F.pad(axes, (0, still)).to(device)
    parts = ((turned.cos(), 1.0), (turned.sin(), 0.0))
    cos, sin = (F.pad(part.mul_(scale), (0, still), value=at_rest).to(device) for part, at_rest in parts)
    return RopeTable(cos.expand(context_length, -1), sin.expand(context_length, -1), axes)


def frequencies(config: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Radians per position of each pair of coordinates. [rotary_dim / 2] float32"""
    base = 1.0 / config.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim)
    if config.factors is not None:
        if len(config.factors) != len(base):
            raise ModelError(f"The rotation has {len(config.factors)} factors, but {len(base)} frequencies.")
        return base / torch.tensor(config.factors, dtype=torch.float32)
    if config.kind in ("linear", "proportional"):
        return base / config.factor
    if config.kind == "llama3":
        return _llama3(base, config)
    if config.kind == "yarn":
        return _yarn(base, config, rotary_dim)
    return base


def magnitude(config: RopeConfig) -> float:
    """What the rotated heads are multiplied by: some sharpen attention to make up for the longer context."""
    if config.attention_factor is not None:
        return config.attention_factor
    return 1.0 if config.kind != "yarn" or config.factor <= 1.0 else 0.1 * math.log(config.factor) + 1.0


def _llama3(base: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Slow rotations are stretched by `factor`, fast ones kept, those between blended by how often they turn."""
    turns = config.original_context * base / (2 * math.pi)
    kept = ((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)).clamp(0.0, 1.0)
    return (1.0 - kept) * base / config.factor + kept * base


def _yarn(base: torch.Tensor, config: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """As Llama 3's, but blended linearly over the coordinates between two rotation counts."""

    def coordinate(turns: float) -> float:
        """Where in the head a pair makes this many turns over the original context."""
        ratio = config.original_context / (turns * 2 * math.pi)
        return rotary_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = coordinate(config.beta_fast), coordinate(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    span = high - low if high > low else 0.001
    kept = 1.0 - ((torch.arange(len(base), dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return base / config.factor * (1.0 - kept) + base * kept
