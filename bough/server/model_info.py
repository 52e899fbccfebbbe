"""The model that is served. A light module: every process of an engine imports it to decode its messages."""

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
    replica_limits: list[dict[str, Any]] = field(default_factory=list)  # the same of each, where there are several

    def to_dict(self) -> dict[str, Any]:
        """For SGLang's /model_info, as far as every user of an engine knows it."""
        from bough.messages.outputs import WEIGHT_VERSION

        return {
            "model_path": self.path,
            "tokenizer_path": self.tokenizer_path,
            "served_model_name": self.name,
            "is_generation": not self.limits.get("is_embedding", False),
            "weight_version": WEIGHT_VERSION,
            "architecture": self.architecture,
            "context_length": self.context_length,
            "vocab_size": self.vocab_size,
        }
