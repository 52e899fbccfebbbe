"""Vectors instead of tokens: what a request may ask for, and what a model makes of its hidden states."""

from typing import Literal

import msgspec

PoolingMode = Literal["mean", "cls", "last"]


class Pooling(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request for a vector. What is left out is as the model was trained. With `all` or `experts`, a request for
    tokens and for what all of them bring along: hidden states, or which experts they have passed. With `align`, for
    where a model that hears looks while it reads its tokens from `second` on: a matrix of as many rows, over the first
    `dimensions` positions."""

    mode: PoolingMode | Literal["all", "experts", "align"] | None = None
    normalize: bool | None = None
    dimensions: int | None = None  # the first so many numbers, of a model trained for that (Matryoshka)
    second: int | None = None  # where the second text of a pair begins: its tokens are of the second type


ALL_STATES, ALL_EXPERTS = Pooling("all"), Pooling("experts")
OF_TOKENS = {ALL_STATES: "return_hidden_states", ALL_EXPERTS: "return_routed_experts"}  # and the field that asks


class VectorConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """What comes of a sequence where no tokens do: a vector, or the scores of labels by a head over it."""

    mode: PoolingMode = "last"
    normalize: bool = True
    labels: tuple[str, ...] = ()  # none: the vector itself
    head: tuple[str, ...] = ()  # its tensors; with a hidden layer it is BERT's (tanh) or, with a norm, ModernBERT's
    size: int = 0  # of the vector
