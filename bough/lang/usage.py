"""What a program has cost, in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Usage:
    """Totals over the requests of a program and its branches. Cached tokens are part of the prompt's."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, meta: Mapping[str, Any]) -> None:
        """One request's meta information."""
        self.requests += 1
        self.prompt_tokens += meta.get("prompt_tokens") or 0
        self.cached_tokens += meta.get("cached_tokens") or 0
        self.completion_tokens += meta.get("completion_tokens") or 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
        )
