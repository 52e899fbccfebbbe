"""Reads how a checkpoint turns positions into rotations, from either generation of Hugging Face configuration.

Up to Transformers 4 a config says `rope_theta` and `rope_scaling`; Transformers 5 writes both into `rope_parameters`,
nested by layer type where sliding layers rotate differently. Where both stand, `rope_scaling` wins, as it does there:
it is what users lay over a configuration.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args, get_type_hints

from bough.core.errors import ModelError
from bough.core.model_config import RopeConfig
from bough.models.fields import Fields

KINDS: tuple[str, ...] = get_args(get_type_hints(RopeConfig)["kind"])
DEFAULT_THETA = 10_000.0


def read_rope(config: Fields, *, partial: bool = False) -> RopeConfig:
    """The rotation of a model's full-attention layers, which for most models are all. `partial`: the family knows
    heads of which a part rotates."""
    given = _parameters(config, "full_attention")
    share = given.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    if share != 1.0 and not partial:
        text = f"{given.where}: partial_rotary_factor = {share} is not supported; the whole head must rotate."
        raise ModelError(text)
    return replace(_parse(given, config), partial_rotary_factor=share)


def with_sections(config: Fields, rope: RopeConfig, alternating: Sequence[int] | None = None) -> RopeConfig:
    """The same rotation by several positions of each token (M-RoPE). `alternating` are the sections of a model in which
    those of pairs stand in turn, where its configuration does not say."""
    given = _parameters(config, "full_attention")
    if alternating is None or "mrope_section" in given.values:
        return replace(rope, sections=tuple(map(int, given.numbers("mrope_section"))), alternating=bool(alternating))
    return replace(rope, sections=tuple(alternating), alternating=True)


def read_local_rope(config: Fields) -> RopeConfig:
    """The rotation of sliding-window layers in a model that tells them apart; scaling for long contexts spares them."""
    nested = config.section("rope_parameters")
    local = nested.section("sliding_attention") if nested else None
    theta = config.number("rope_local_base_freq", DEFAULT_THETA)
    if local is None:
        return RopeConfig(theta=theta)
    return _parse(Fields(local.where, {"rope_theta": theta, **local.values}), config)


def trained_context(config: Fields, rope: RopeConfig) -> int:
    """The longest sequence the configuration promises: some state the length before scaling, some after."""
    stated = config.integer("max_position_embeddings")
    return max(stated, int(rope.original_context * rope.factor)) if rope.kind == "yarn" else stated


def score_factor(config: Fields) -> float:
    """What DeepSeek's models multiply all scores with where YaRN stretches their context: the rotation alone would
    sharpen only the part of each head that rotates."""
    given = _parameters(config, "full_attention")
    weight = given.optional_number("mscale_all_dim")
    return 1.0 if weight is None else _temperature(weight, given.number("factor", 1.0)) ** 2


def _parameters(config: Fields, layer_type: str) -> Fields:
    found = config.section("rope_parameters")
    if found is not None:
        found = found.section(layer_type) or found
    scaling = config.section("rope_scaling")
    values = {**(found.values if found else {}), **(scaling.values if scaling else {})}
    values.setdefault("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    return Fields((scaling or found or config).where, values)


def _parse(given: Fields, config: Fields) -> RopeConfig:
    kind = given.text("rope_type", given.text("type", "default"))
    alpha = given.optional_number("alpha")
    if kind == "dynamic" and alpha is not None:  # Hunyuan's, which depends on no length
        heads = config.integer("num_attention_heads")
        dim = config.optional_integer("head_dim") or config.integer("hidden_size") // heads
        return RopeConfig(given.number("rope_theta") * alpha ** (dim / (dim - 2)))
    # A first name; one with `mrope_section` beside; and one that changes nothing within the context of the model.
    kind = {"su": "longrope", "mrope": "default", "dynamic": "default"}.get(kind, kind)
    if kind not in KINDS:
        raise ModelError(f"{given.where}: rope type {kind!r} is not supported; supported are {', '.join(KINDS)}.")
    theta = given.number("rope_theta")
    if kind == "linear":
        return RopeConfig(theta, "linear", factor=given.number("factor"))
    if kind == "proportional":
        return RopeConfig(theta, "proportional", factor=given.number("factor", 1.0))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            factor=given.number("factor"),
            low_freq_factor=given.number("low_freq_factor"),
            high_freq_factor=given.number("high_freq_factor"),
            original_context=given.integer("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _parse_yarn(given, config, theta)
    return _parse_longrope(given, config, theta) if kind == "longrope" else RopeConfig(theta)


def _stretch(given: Fields, config: Fields) -> tuple[int, float]:
    """The context before scaling, and by how much it grows."""
    longest = config.integer("max_position_embeddings")
    original = given.integer(
        "original_max_position_embeddings", config.integer("original_max_position_embeddings", longest)
    )
    return original, given.number("factor", longest / original)


def _parse_longrope(given: Fields, config: Fields, theta: float) -> RopeConfig:
    original, factor = _stretch(given, config)
    sharper = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 else 1.0
    return RopeConfig(
        theta,
        "longrope",
        factor=factor,
        original_context=original,
        attention_factor=given.number("attention_factor", sharper),
        factors=given.numbers("long_factor"),
        short_factors=given.numbers("short_factor"),
    )


def _parse_yarn(given: Fields, config: Fields, theta: float) -> RopeConfig:
    original, factor = _stretch(given, config)
    return RopeConfig(
        theta,
        "yarn",
        factor=factor,
        original_context=original,
        beta_fast=given.number("beta_fast", 32.0),
        beta_slow=given.number("beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(given, factor),
        truncate=given.boolean("truncate", True),
    )


def _yarn_attention_factor(given: Fields, factor: float) -> float:
    """YaRN sharpens attention as the context is stretched; the paper's rule unless the checkpoint has its own."""
    stated = given.optional_number("attention_factor")
    if stated is not None:
        return stated
    above, below = given.optional_number("mscale"), given.optional_number("mscale_all_dim")
    return _temperature(above, factor) / _temperature(below, factor) if above and below else _temperature(1.0, factor)


def _temperature(weight: float, factor: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0
