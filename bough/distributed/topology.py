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
    them into `ep_size` runs of neighbours; those of a run share the inner width of the experts that it has.
    Pipelines have `pp_size` stages of `tp_size` ranks, each with some of the layers. With DP attention there are
    `dp_size` groups of `tp_size` ranks; experts are spread over all of them."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    @property
    def all_groups(self) -> Topology:
        """The ranks of all groups as one."""
        return self if self.dp_size == 1 else Topology(self.rank, self.ranks, self.ep_size)

    @property
    def in_expert(self) -> Topology:
        """The ranks of a run: who shares an expert."""
        size = self.all_groups.tp_size // self.ep_size
        return Topology(self.all_groups.tp_rank % size, size)

    @classmethod
    def at(cls, rank: int, tp_size: int, pp_size: int, ep_size: int = 1) -> Topology:
        """The place of one of the engine's ranks: those of a stage have numbers in a row."""
        return cls(rank % tp_size, tp_size, ep_size, rank // tp_size, pp_size)

    @property
    def rank(self) -> int:
        return (self.dp_rank * self.pp_size + self.pp_rank) * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> int:
        return self.tp_size * self.pp_size * self.dp_size

    @property
    def is_first(self) -> bool:
        """Whether this rank's stage begins with tokens."""
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank's stage ends with logits, and samples."""
        return self.pp_rank == self.pp_size - 1

    @property
    def has_ends(self) -> bool:
        """Whether this rank's parts of tensors are the last ones."""
        return self.all_groups.tp_rank == self.all_groups.tp_size - 1

    def layers_of(self, config: ModelConfig) -> range:
        """The layers of this rank's stage."""
        begins = [*_stage_begins(config, self.pp_size), config.num_layers]
        return range(begins[self.pp_rank], begins[self.pp_rank + 1])

    def states_of(self, config: ModelConfig) -> RecurrentConfig | None:
        """What this rank keeps of recurrent layers, those of its stage; None: the model has no such layer."""
        states, own = config.states, self.layers_of(config)
        if states is None:
            return None
        own_layers = tuple(recurs and layer in own for layer, recurs in enumerate(states.layers))
        return replace(self.recurrent_share(states), layers=own_layers)

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


ONE_RANK = Topology()


def _stage_begins(config: ModelConfig, stages: int) -> list[int]:
    """The first layer of each stage. The embedding and the head count as so many layers as their matrix is worth."""
    begins, ends = [0], config.vocab_size * config.hidden_size / config.layer_weights
    places = [layer for layer in range(1, config.num_layers) if stages > 1 and config.stands_alone(layer)]
    if stages > len(places) + 1:
        most = f"--pp-size {stages}: the {config.num_layers} layers of this model make {len(places) + 1} stages at most"
        raise SettingsError(f"{most}. Layers that share keys, values, chosen tokens or further inputs stay together.")
    for stage in range(1, stages):
        ideal = stage * (config.num_layers + 2 * ends) / stages - ends
        left = places[: len(places) + 1 + stage - stages]  # each stage behind it needs one too
        begins.append(min((place for place in left if place > begins[-1]), key=lambda place: abs(place - ideal)))
    return begins
