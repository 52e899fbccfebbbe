"""A vocabulary shared among ranks."""

from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from bough.layers.placement import Placement
from bough.layers.schemes.plain import PlainTable
from bough.layers.weights import WeightSlot


class ShardedTable:
    """Each rank has a run of the tokens, all of one length but the last ones. A vector is the sum of what the ranks
    know of it; logits are gathered, so every rank has all."""

    def __init__(self, vocab_size: int, hidden_size: int, placement: Placement) -> None:
        topology = placement.topology
        self._vocab_size, self._width = vocab_size, -(-vocab_size // topology.tp_size)
        first = min(topology.tp_rank * self._width, vocab_size)
        self._held = slice(first, min(first + self._width, vocab_size))
        self._own = PlainTable(self._held.stop - first, hidden_size, placement)
        self._ranks = placement.ranks

    def embed(self, token_ids: torch.Tensor, scale: float) -> torch.Tensor:
        elsewhere = (token_ids < self._held.start) | (token_ids >= self._held.stop)
        vectors = self._own.embed((token_ids - self._held.start).masked_fill(elsewhere, 0), scale)
        return self._ranks.all_reduce(vectors.masked_fill(elsewhere[:, None], 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        own = self._own.logits(hidden)
        return self._ranks.all_gather(pad(own, (0, self._width - own.shape[1])))[:, : self._vocab_size].contiguous()

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", self._own.weight, (self._held,))
