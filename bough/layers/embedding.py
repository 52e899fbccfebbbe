"""The two ends of a model: token ids to vectors, and vectors to logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bough.attention.context import ForwardContext
from bough.layers.placement import Placement
from bough.layers.schemes.base import TableWeight
from bough.layers.weights import WeightSlot


class Embedding:
    """A vector for each token, times `scale`."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, placement: Placement) -> None:
        self.table = placement.make_table(vocab_size, hidden_size, placement)
        # Models with a scale were trained with it rounded to the type of the weights.
        self._scale = float(torch.tensor(scale, dtype=placement.dtype))

    def __call__(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.table.embed(token_ids, self._scale)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.table.slots(prefix)


class Head:
    """Logits over the vocabulary, in the type of the weights or, where they are capped, in float32. A tied head uses
    the embedding's table and needs no slot of its own."""

    def __init__(
        self,
        table: TableWeight,
        softcap: float | None,
        placement: Placement,
        scale: float = 1.0,
        bias: torch.Tensor | None = None,
    ) -> None:
        self._table, self.bias = table, bias
        self._cap = placement.ops.softcap
        self._softcap = softcap
        self._scale = scale

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._table.logits(hidden)
        if self.bias is not None:
            logits = logits + self.bias
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._softcap is None else self._cap(logits, self._softcap)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._table.slots(prefix)
