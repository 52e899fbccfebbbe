"""Rotary embedding: the angles of each position, for every way of stretching a context that checkpoints use.

Frequencies are computed once, when a model is built, in float32 as transformers does, so that both rotate alike. The
angles of a step are computed once a step for all layers; a table over the whole context would only cost memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bough.core.model_config import RopeConfig


@dataclass(frozen=True, slots=True)
class Angles:
    """Of each token of a step, in the form that `apply_rope` takes: float32 [tokens, 1, head_dim]."""

    cos: torch.Tensor
    signed_sin: torch.Tensor


class RotaryEmbedding:
    """Turns positions into angles."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = frequencies(config, head_dim).to(device)
        self._magnitude = magnitude(config)

    def __call__(self, positions: torch.Tensor) -> Angles:
        turned = positions[:, None, None].float() * self._frequencies
        cos, sin = turned.cos(), turned.sin()
        if self._magnitude != 1.0:
            cos, sin = cos.mul_(self._magnitude), sin.mul_(self._magnitude)
        return Angles(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of coordinates. [head_dim / 2] float32"""
    base = 1.0 / config.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if config.factors is not None:
        return base / torch.tensor(config.factors, dtype=torch.float32)
    if config.kind == "linear":
        return base / config.factor
    if config.kind == "llama3":
        return _llama3(base, config)
    if config.kind == "yarn":
        return _yarn(base, config, head_dim)
    return base


def magnitude(config: RopeConfig) -> float:
    """What the rotated heads are multiplied by: YaRN sharpens attention to make up for the longer context."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    return 1.0 if config.factor <= 1.0 else 0.1 * math.log(config.factor) + 1.0


def _llama3(base: torch.Tensor, config: RopeConfig) -> torch.Tensor:
    """Slow rotations are stretched by `factor`, fast ones kept, those between blended by how often they turn."""
    turns = config.original_context * base / (2 * math.pi)
    kept = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * base / config.factor + kept * base


def _yarn(base: torch.Tensor, config: RopeConfig, head_dim: int) -> torch.Tensor:
    """As Llama 3's, but blended linearly over the coordinates between two rotation counts."""

    def coordinate(turns: float) -> float:
        """Where in the head a pair makes this many turns over the original context."""
        ratio = config.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low = max(math.floor(coordinate(config.beta_fast)), 0)
    high = min(math.ceil(coordinate(config.beta_slow)), head_dim - 1)
    span = high - low if high > low else 0.001
    kept = 1.0 - ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return base / config.factor * (1.0 - kept) + base * kept
