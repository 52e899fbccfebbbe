"""Which share of the model this rank holds.

Layers take a `Topology` at construction and ask it for their share; with one rank every share is the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from bough.core.errors import SettingsError
from bough.core.model_config import ModelConfig, RecurrentConfig


@dataclass(frozen=True, slots=True)
class Topology:
    """Tensor parallelism: `tp_size` ranks, each with an equal slice of every sharded dimension. Expert parallelism cuts
    them into `ep_size` runs of neighbours; those of a run share the inner width of the experts that it has."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_size: int = 1

    @property
    def ep_rank(self) -> int:
        """The run of this rank."""
        return self.tp_rank // (self.tp_size // self.ep_size)

    @property
    def in_expert(self) -> Topology:
        """The ranks of a run: who shares an expert."""
        size = self.tp_size // self.ep_size
        return Topology(self.tp_rank % size, size)

    def share(self, total: int, what: str) -> int:
        """How many of `total` this rank holds."""
        if total % self.tp_size:
            raise SettingsError(f"{what} ({total}) cannot be divided among {self.tp_size} ranks.")
        return total // self.tp_size

    def slice_of(self, total: int, what: str) -> slice:
        """Which of `total` this rank holds."""
        size = self.share(total, what)
        return slice(self.tp_rank * size, (self.tp_rank + 1) * size)

    def kv_slice_of(self, kv_heads: int, what: str = "num_kv_heads") -> slice:
        """Which key/value heads this rank holds: fewer heads than ranks are replicated, each on several ranks."""
        if kv_heads >= self.tp_size:
            return self.slice_of(kv_heads, what)
        if self.tp_size % kv_heads:
            raise SettingsError(f"{what} ({kv_heads}) cannot be shared by {self.tp_size} ranks.")
        head = self.tp_rank * kv_heads // self.tp_size
        return slice(head, head + 1)

    def recurrent_share(self, whole: RecurrentConfig) -> RecurrentConfig:
        """What this rank has of recurrent layers: some of the heads, and the key heads that serve them."""
        keys = self.kv_slice_of(whole.key_heads, "recurrent key heads")
        return replace(whole, heads=self.share(whole.heads, "recurrent heads"), key_heads=keys.stop - keys.start)

    def held(self, config: ModelConfig) -> ModelConfig:
        """The model as far as its cache goes, with this rank's part of the states."""
        return config if config.recurrent is None else replace(config, recurrent=self.recurrent_share(config.recurrent))
