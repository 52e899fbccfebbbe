"""The two ends of a model: token ids to vectors, and vectors to logits. Every rank holds the whole vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot


class Embedding:
    """A vector for each token, times `scale`."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, placement: Placement) -> None:
        self.weight = placement.empty(vocab_size, hidden_size)
        self._embedding = placement.ops.embedding
        # Models with a scale were trained with it rounded to the type of the weights.
        self._scale = float(torch.tensor(scale, dtype=placement.dtype))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embedding(token_ids, self.weight, self._scale)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}.weight", self.weight)


class Head:
    """Logits over the vocabulary, in the type of the weights or, where they are capped, in float32. A tied head uses
    the embedding's tensor and needs no slot of its own."""

    def __init__(self, weight: torch.Tensor, softcap: float | None, placement: Placement) -> None:
        self.weight = weight
        self._logits = placement.ops.logits
        self._softcap = softcap

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._logits(hidden, self.weight)
        if self._softcap is not None:
            # The cap squeezes the best logits together: 16-bit numbers would no longer tell them apart.
            logits = torch.tanh(logits.float() / self._softcap).mul_(self._softcap)
        return logits

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}.weight", self.weight)
