"""The model that is served. A light module: every process of an engine imports it to decode its messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The one model that is served, whatever name a request gives."""

    name: str  # never a path, so that it can stand in an address
    path: str
    tokenizer_path: str
    architecture: str
    context_length: int
    vocab_size: int
    created: int  # when the server started, in seconds since 1970
    limits: dict[str, Any] = field(default_factory=dict)  # everything that the scheduler announced when it was ready
