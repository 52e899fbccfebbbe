"""LoRA adapters over linear layers: each adds a product of two thin matrices for the tokens that chose it. On a CPU
they may change the embedding and the head, too.

`AdapterSlots` wraps a model's way to keep weights. An adapter is put into a slot; the forward context says which tokens
compute with which slot. Without such tokens a layer does what it would do without adapters.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from bough.attention.context import ForwardContext
from bough.kernels.lora.reference import LEAST_RANK, AdapterStack, GroupedRows, tiles_of
from bough.kernels.ops import Activation, NormedSum, WithSum
from bough.layers.placement import Placement, TableMaker, WeightMaker
from bough.layers.schemes.base import Gate, GatedRows, LinearWeight, Part, Rows, TableWeight, bands
from bough.layers.weights import WeightSlot

# By the names that the matrices have in the model, without `.weight`: `down` [rank, inputs] and `up` [outputs, rank],
# which is scaled already. What is added to the matrix is their product.
Adapter = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
HEAD = "lm_head"  # the name of what adapters change at a model's end, also where it is the embedding's table


class AdapterSlots:
    """The linear layers of one model that adapters may change."""

    def __init__(self, slots: int, *, tables: bool = False) -> None:
        """`tables`: the embedding and the head may be changed, too."""
        self.count, self.tables, self.rank = slots, tables, 0  # there is memory for this rank
        self._weights: list[AdaptedWeight] = []
        self._tables: list[AdaptedTable] = []
        self._ranks: torch.Tensor | None = None  # [slots, matrices of all layers] int32

    def over(self, make: WeightMaker) -> WeightMaker:
        """The scheme, with adapters over its weights."""

        def make_adapted(in_features: int, parts: Sequence[Part], bias: bool, placement: Placement) -> LinearWeight:
            weight = make(in_features, parts, bias, placement)
            self._weights.append(AdaptedWeight(weight, in_features, parts, placement))
            return self._weights[-1]

        return make_adapted

    def over_table(self, make: TableMaker) -> TableMaker:
        """The same for vocabularies."""

        def make_adapted(vocab_size: int, hidden_size: int, placement: Placement) -> TableWeight:
            self._tables.append(AdaptedTable(make(vocab_size, hidden_size, placement), vocab_size, hidden_size))
            return self._tables[-1]

        return make_adapted if self.tables else make

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of each matrix."""
        ends = {name: shape for table in reversed(self._tables) for name, shape in table.shapes().items()}
        held = ((name, band, weight.inputs) for weight in self._weights for name, band, _ in weight.matrices())
        return ends | {name: (band.stop - band.start, inputs) for name, band, inputs in held}

    def share(self, adapter: Adapter) -> Adapter:
        """This rank's part of an adapter for the whole model, cut as its matrices are: of `up` the outputs, of `down`
        the inputs that are here. Every rank of a stage has all of the model's ends that the stage has."""
        ends = (name for table in self._tables for name in table.shapes())
        cuts: dict[str, tuple[slice, ...]] = dict.fromkeys(ends, (slice(None),) * 2)
        cuts |= {name: index for weight in self._weights for name, _, index in weight.matrices()}
        here = {name: both for name, both in adapter.items() if name in cuts}
        return {name: (down[:, cuts[name][1]], up[cuts[name][0]]) for name, (down, up) in here.items()}

    def reserve(self, rank: int) -> None:
        """Takes memory in all slots for adapters of this rank, in the place of what there is."""
        padded = max(LEAST_RANK, 1 << (rank - 1).bit_length())
        counts, device = [weight.reserve(self.count, padded) for weight in self._weights], self._weights[0].device
        if self._ranks is None:
            self._ranks = torch.zeros(self.count, sum(counts), dtype=torch.int32, device=device)
            for weight, ranks in zip(self._weights, torch.split(self._ranks, counts, dim=1), strict=True):
                weight.ranks = ranks
        self.rank = padded

    def place(self, slot: int, adapter: Adapter) -> None:
        """Copies an adapter into the slot."""
        assert self._ranks is not None
        for table in self._tables:
            table.held[slot] = adapter
        ranks = [rank for weight in self._weights for rank in weight.place(slot - 1, adapter)]
        self._ranks[slot - 1].copy_(torch.tensor(ranks, dtype=torch.int32), non_blocking=True)


class AdaptedWeight(LinearWeight):
    """The weight of a layer, and what each slot adds to it."""

    def __init__(self, weight: LinearWeight, in_features: int, parts: Sequence[Part], placement: Placement) -> None:
        self._weight, self.inputs, self._parts, self._ops = weight, in_features, tuple(parts), placement.ops
        self._prefix, self._empty, self.device = "", placement.empty, placement.device
        self._bands = tuple(band for _, band in bands(parts))
        self._tiles = torch.from_numpy(tiles_of(self._bands)).to(self.device)
        self._down, self._up, self.ranks = (torch.empty(0, device=self.device) for _ in range(3))

    def matrices(self) -> list[tuple[str, slice, tuple[slice, ...]]]:
        """Their names, which outputs are theirs, and which rows and columns of the whole matrices are here."""
        return [(self._prefix + part.name, band, (*part.index, slice(None))) for part, band in bands(self._parts)]

    def reserve(self, slots: int, rank: int) -> int:
        """Takes memory for matrices of this rank, and moves there what the slots hold; how many matrices there are."""
        down = self._empty(slots, len(self._parts), rank, self.inputs)
        up = self._empty(slots, self._bands[-1].stop, rank)
        if len(self._down):
            down[:, :, : self._down.shape[2]], up[:, :, : self._up.shape[2]] = self._down, self._up
        self._down, self._up = down, up
        return len(self._parts)

    def place(self, slot: int, adapter: Adapter) -> Iterator[int]:
        """Copies what the adapter has for these matrices, and yields their ranks."""
        for number, (name, band, _) in enumerate(self.matrices()):
            down, up = adapter.get(name, (self._down[slot, number, :0], self._up[slot, band, :0]))
            self._down[slot, number, : len(down)].copy_(down, non_blocking=True)
            self._up[slot, band, : len(down)].copy_(up, non_blocking=True)
            yield len(down)

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        product = self._weight.linear(x, ctx)
        if ctx.adapters is not None:
            x = x if isinstance(x, torch.Tensor) else x.dequantize().to(product.dtype)
            stack = AdapterStack(self._down, self._up, self.ranks, self._bands, self._tiles)
            self._ops.lora_(product, x, stack, ctx.adapters.among(len(x), ctx.logits_indices))
        return product

    def after_norm(self, inputs: NormedSum, ctx: ForwardContext) -> WithSum:
        if ctx.adapters is None:
            return self._weight.after_norm(inputs, ctx)
        return super().after_norm(inputs, ctx)

    def gated_after_norm(self, inputs: NormedSum, activation: Activation, gate: Gate, ctx: ForwardContext) -> GatedRows:
        if ctx.adapters is None:
            return self._weight.gated_after_norm(inputs, activation, gate, ctx)
        gate_up, total = self.after_norm(inputs, ctx)
        # Not as the next weight would have it: its adapters are to multiply what was not rounded.
        return super().gate(gate_up, activation), total

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> Rows:
        return self._weight.gate(gate_up, activation)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        self._prefix = prefix
        yield from self._weight.slots(prefix)


class AdaptedTable:
    """A vocabulary, and what adapters add to it where tokens become vectors and where hidden states become logits. Its
    slots refer to adapters in the host's memory, so there is nothing to copy."""

    def __init__(self, table: TableWeight, vocab_size: int, hidden_size: int) -> None:
        self._table, self._shape, self._name = table, (vocab_size, hidden_size), ""
        self.held: dict[int, Adapter] = {}  # by slot

    def shapes(self) -> dict[str, tuple[int, int]]:
        return {self._name: (self._shape[1], self._shape[0]), HEAD: self._shape}

    def embed(self, token_ids: torch.Tensor, scale: float, adapted: GroupedRows | None = None) -> torch.Tensor:
        vectors = self._table.embed(token_ids, scale)
        for places, down, up in self._changes(self._name, adapted):
            vectors.index_add_(0, places, down[:, token_ids[places]].T @ up.T * scale)
        return vectors

    def logits(self, hidden: torch.Tensor, adapted: GroupedRows | None = None) -> torch.Tensor:
        logits = self._table.logits(hidden)
        for places, down, up in self._changes(HEAD, adapted):
            logits.index_add_(0, places, hidden[places] @ down.T @ up.T)
        return logits

    def _changes(self, name: str, rows: GroupedRows | None) -> Iterator[tuple[torch.Tensor, ...]]:
        if rows is None:
            return
        for slot, first, count in rows.blocks.tolist():
            if name in self.held.get(slot, ()):
                yield rows.order[first : first + count], *self.held[slot][name]

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        self._name = prefix.removesuffix(".")
        yield from self._table.slots(prefix)
