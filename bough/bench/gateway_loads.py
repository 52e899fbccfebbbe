"""The loads of `bough bench gateway`: conversations whose prompts share what real ones share.

`shared-prefix`: many system prompts, each with many questions, in random order. `multi-turn`: conversations that send
their whole history again with every turn. `hot-prefix`: one system prompt takes most of the traffic. The same seed
makes the same load. Texts are made of whole tokens of the stand-in engines.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass

from bough.bench.gateway_model import TOKEN_CHARS


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How large a load is; lengths are in tokens."""

    requests: int = 4096
    system_prompts: int = 128
    system_tokens: int = 2048
    question_tokens: int = 256
    output_tokens: int = 64
    turns: int = 8
    hot_share: float = 0.8
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and how long the answer will be."""

    text: str
    output_tokens: int


# What one user sends; each turn's prompt is everything said before, answers included, and the turn's own text.
Dialogue = tuple[Turn, ...]


def shared_prefix(options: LoadOptions) -> list[Dialogue]:
    draw = random.Random(options.seed)
    systems = [_text(draw, options.system_tokens) for _ in range(options.system_prompts)]
    return [(_turn(draw, draw.choice(systems), options),) for _ in range(options.requests)]


def hot_prefix(options: LoadOptions) -> list[Dialogue]:
    draw = random.Random(options.seed)
    hot, *others = (_text(draw, options.system_tokens) for _ in range(max(2, options.system_prompts)))
    return [
        (_turn(draw, hot if draw.random() < options.hot_share else draw.choice(others), options),)
        for _ in range(options.requests)
    ]


def multi_turn(options: LoadOptions) -> list[Dialogue]:
    draw = random.Random(options.seed)
    return [
        tuple(_turn(draw, "", options) for _ in range(options.turns))
        for _ in range(max(1, options.requests // options.turns))
    ]


LOADS: dict[str, Callable[[LoadOptions], list[Dialogue]]] = {
    "shared-prefix": shared_prefix,
    "multi-turn": multi_turn,
    "hot-prefix": hot_prefix,
}


def _turn(draw: random.Random, before: str, options: LoadOptions) -> Turn:
    """A question behind `before`. Answers differ in length, so that users fall out of step as real ones do."""
    output_tokens = draw.randint(max(1, options.output_tokens // 2), options.output_tokens)
    return Turn(before + _text(draw, options.question_tokens), output_tokens)


def _text(draw: random.Random, tokens: int) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=tokens * TOKEN_CHARS))
