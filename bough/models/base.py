"""What an executor may ask of a model."""

from collections.abc import Iterator
from typing import Protocol

import torch

from bough.attention.context import AdaptedRows, ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.embedding import LabelHead
from bough.layers.weights import WeightSlot


class CausalLM(Protocol):
    """A decoder that continues sequences of tokens. It holds weights only: what concerns requests is in the pool."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def label_head(self) -> LabelHead | None: ...

    def forward(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Hidden states [n, hidden_size] of int64 [tokens], those that `ctx.logits_indices` names; writes the keys
        and values of all tokens to the pool."""
        ...

    def logits(self, hidden: torch.Tensor, adapted: AdaptedRows | None = None) -> torch.Tensor:
        """[n, vocab_size], in the type of the weights or wider, of those hidden states [n, hidden_size] whose next
        token is asked for. `adapted` are those whose adapters may change the head."""
        ...

    def slots(self) -> Iterator[WeightSlot]:
        """Every tensor that must be filled before the first forward pass."""
        ...
