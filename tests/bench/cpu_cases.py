"""The loads of `bough bench cpu` and what its processes say to each other: lines of JSON, seeded token ids only.

Every load has one shape: a prefix that all requests share (often empty), tokens of each request's own, and a number of
output tokens, generated greedily and past any end of sequence. A measured process gets a load and answers with times.
"""

from __future__ import annotations

import random
from typing import Any, Literal

import msgspec

Counted = Literal["decode", "prompt", "total"]
VOCABULARY = 10_000
PROMPT_TOKENS = 32  # of a short prompt


class Order(msgspec.Struct, frozen=True):
    """What a measured process is started with: the model, the threads, and when it was spawned (monotonic clock)."""

    model: str
    threads: int
    spawned: float
    settings: dict[str, Any]


class Case(msgspec.Struct, frozen=True):
    """One load."""

    name: str
    title: str
    counted: Counted
    prefix: list[int]  # shared by all requests
    prompts: list[list[int]]  # each request's own tokens behind it
    output_tokens: int  # of each request
    cpu_time: bool = False  # seconds are CPU time of the process, not wall time


class Timing(msgspec.Struct, frozen=True):
    """One run of a load: seconds from its beginning until every request has its first token, and until all is done."""

    first_s: float
    total_s: float
    first_tokens: int = 1  # of a single request: those that came with the first

    def rate(self, case: Case) -> float:
        """Tokens per second, of the tokens that the load counts."""
        if case.counted == "prompt":
            return len(case.prefix + case.prompts[0]) / self.first_s
        if case.counted == "decode":
            return (case.output_tokens - self.first_tokens) / (self.total_s - self.first_s)
        return len(case.prompts) * case.output_tokens / self.total_s


class Start(msgspec.Struct, frozen=True):
    """From spawning a measured process to its first token: (what, seconds) one after the other."""

    parts: list[tuple[str, float]]
    cpu_s: float = 0.0  # CPU time of all its processes meanwhile

    @property
    def total_s(self) -> float:
        return sum(seconds for _, seconds in self.parts)


def cases(scale: float = 1.0, seed: int = 0, vocabulary: int = VOCABULARY) -> list[Case]:
    """All loads; a `scale` below 1 shortens them, for a quick try."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(max(1, round(count * scale)))]

    def tokens(count: int) -> int:
        return max(2, round(count * scale))

    def many(count: int, length: int) -> list[list[int]]:
        return [ids(length) for _ in range(count)]

    return [
        Case("decode", "one stream, decode", "decode", [], [ids(PROMPT_TOKENS)], tokens(128)),
        Case("prompt-512", "prompt of 512", "prompt", [], [ids(512)], 1),
        Case("prompt-2048", "prompt of 2,048", "prompt", [], [ids(2048)], 1),
        Case("streams-16", "16 streams × 64 tokens", "total", [], many(16, PROMPT_TOKENS), tokens(64)),
        Case("chats-32", "32 chats × 32 tokens over 1,000", "total", ids(1000), many(32, 16), tokens(32)),
    ]
