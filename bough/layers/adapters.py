"""LoRA adapters over linear layers, experts, the embedding and the head: each adds a product of two thin matrices for
the tokens that chose it.

`AdapterSlots` wraps a model's way to keep weights. An adapter is put into a slot; the forward context says which tokens
compute with which slot. Without such tokens a layer does what it would do without adapters.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from bough.attention.base import LatentAdapters
from bough.attention.context import AdaptedRows, ForwardContext
from bough.core.model_config import LatentConfig, MoEConfig
from bough.kernels.lora.reference import (
    LEAST_RANK,
    MAX_RANK,
    AdapterRows,
    AdapterStack,
    GroupedRows,
    PackedStack,
    PairAdapters,
    tiles_of,
    to_tiles,
)
from bough.kernels.ops import Activation, NormedSum, PackedOps, Router, WithNorm, WithSum
from bough.layers.placement import ExpertsMaker, Placement, TableMaker, WeightMaker
from bough.layers.schemes.base import ExpertWeights, Gate, GatedRows, LinearWeight, Part, Rows, TableWeight, bands
from bough.layers.schemes.packed import PackedExperts
from bough.layers.schemes.plain import MatrixExperts
from bough.layers.weights import WeightSlot

# By the names that the matrices have in the model, without `.weight`: `down` [rank, inputs] and `up` [outputs, rank],
# which is scaled already. What is added to the matrix is their product. Those of a layer's experts have one name, that
# of an expert without its number, and a first dimension more.
Adapter = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
Makers = tuple[WeightMaker, TableMaker, ExpertsMaker]
ThinMaker = Callable[..., "ThinMatrices"]
# The second is the name of what adapters change at a model's end, also where it is the embedding's table.
EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
WHOLE = slice(None)
MOST_TOKENS = 1024  # that experts with adapters take at once: their pairs need more memory than those without


class ThinMatrices:
    """What all slots add to one product, or to that of each of `experts`: memory for it, once some adapter needs it."""

    def __init__(self, inputs: int, parts: Sequence[Part], placement: Placement, experts: int = 0) -> None:
        self._inputs, self._parts, self._experts, self._placement = inputs, tuple(parts), experts, placement
        self._bands = tuple(band for _, band in bands(parts))
        self._tiles = torch.from_numpy(tiles_of(self._bands)).to(placement.device)
        self._down, self._up, self.ranks = (torch.empty(0, device=placement.device) for _ in range(3))
        self.prefix, self.rank = "", 0  # for which there is memory

    def matrices(self) -> list[tuple[str, slice, tuple[slice, ...]]]:
        """Of each the name, which outputs are its own, and which rows and columns of the whole matrix are here. One
        whose results are keys and values stands there twice."""
        return [(self.prefix + part.name, band, (*part.index, WHOLE)) for part, band in bands(self._parts)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Outputs and inputs of each, and how many experts have one."""
        more = (self._experts,) if self._experts else ()
        return {name: (band.stop - band.start, self._inputs, *more) for name, band, _ in self.matrices()}

    def named_in(self, names: Collection[str]) -> bool:
        """Whether something here has one of these names or ends of names, or `all` is one of them."""
        return "all" in names or any(name in names or name.rpartition(".")[2] in names for name in self.shapes())

    def reserve(self, slots: int, rank: int) -> None:
        """Takes memory for matrices of this rank, and moves there what the slots hold."""
        # Zeros, because `add_columns_` reads also what lies beyond an adapter's rank, and multiplies it with zeros.
        experts, empty = self._experts or 1, self._placement.empty
        down = empty(slots, experts, len(self._parts), rank, self._inputs).zero_()
        up = empty(slots, experts, self._bands[-1].stop, rank).zero_()
        if self.rank:
            down[..., : self.rank, :], up[..., : self.rank] = self._down, self._up
        self._down, self._up, self.rank = down, up, rank

    def place(self, slot: int, adapter: Adapter) -> Iterator[int]:
        """Copies what the adapter has for these matrices, and yields their ranks."""
        for number, (name, band, _) in enumerate(self.matrices()):
            down, up = adapter.get(name, (self._down[slot, :, number, :0], self._up[slot, :, band, :0]))
            rank = down.shape[-2]
            self._down[slot, :, number, :rank].copy_(down, non_blocking=True)
            self._up[slot, :, band, :rank].copy_(up, non_blocking=True)
            yield rank

    @property
    def stack(self) -> AdapterStack:
        held = (self._down.flatten(0, 1), self._up.flatten(0, 1), self.ranks)
        return AdapterStack(*held, self._tiles, self._experts or 1)

    def add_(self, product: torch.Tensor, x: torch.Tensor, rows: GroupedRows) -> None:
        if self.rank:
            self._placement.ops.lora_(product, x, self.stack, rows)

    def add_step_(self, product: torch.Tensor, x: torch.Tensor, ctx: ForwardContext) -> None:
        """The same for the tokens of a step, if any has an adapter."""
        if ctx.adapters is not None:
            self.add_(product, x, ctx.adapters.among(len(x), ctx.logits_indices))

    def add_columns_(self, product: torch.Tensor, columns: torch.Tensor, scale: float, rows: GroupedRows) -> None:
        """The same for rows of inputs that are 0 but for one, the column, where they are `scale`."""
        x = self._down[rows.slots.long() - 1, 0, 0, :, columns] * scale  # rows without a slot are not read
        same = torch.eye(self.rank, dtype=x.dtype, device=x.device).repeat(len(self._down), 1, 1, 1)
        self._placement.ops.lora_(product, x, self.stack._replace(down=same), rows)


class PackedThin(ThinMatrices):
    """The same for the native CPU kernels, which read an adapter where it lies: a slot has addresses."""

    def __init__(self, slots: int, inputs: int, parts: Sequence[Part], placement: Placement, experts: int = 0) -> None:
        super().__init__(inputs, parts, placement, experts)
        self.rank, self._ops = MAX_RANK, cast(PackedOps, placement.ops)
        starts = np.array([0, *(band.stop for band in self._bands)], np.int64)
        self.packed = PackedStack(np.zeros((slots, experts or 1, len(parts), 3), np.int64), inputs, starts)
        self._held: dict[int, Adapter] = {}

    def place(self, slot: int, adapter: Adapter) -> Iterator[int]:
        self._held[slot], thin = adapter, self.packed.thin[slot]
        for number, (name, *_) in enumerate(self.matrices()):
            both = adapter.get(name, ())
            for column, tiles in enumerate(both):  # of one expert behind those of the other, or the same for all
                apart = tiles.nbytes // len(thin) if tiles.dim() > 3 else 0
                thin[:, number, column] = tiles.data_ptr() + np.arange(len(thin)) * apart
            thin[:, number, 2] = both[1].shape[-2] if both else 0
            yield int(thin[0, number, 2])

    def add_(self, product: torch.Tensor, x: torch.Tensor, rows: GroupedRows) -> None:
        self._ops.packed_lora(product, x, self.packed, 1.0)

    def add_columns_(self, product: torch.Tensor, columns: torch.Tensor, scale: float, rows: GroupedRows) -> None:
        self._ops.packed_lora(product, None, self.packed, scale)


class LatentThin(ThinMatrices):
    """The same for the matrix that makes keys and values of latents, whose rows are head by head those of the keys and
    those of the values. In the absorbed form tokens are multiplied with parts of it, some of them transposed."""

    def __init__(self, latent: LatentConfig, heads: slice, placement: Placement) -> None:
        self._latent, self._heads, of_head = latent, heads.stop - heads.start, latent.nope_dim + latent.value_dim
        part = Part("kv_b_proj", self._heads * of_head, (slice(heads.start * of_head, heads.stop * of_head),))
        super().__init__(latent.rank, [part], placement)

        def tiles(width: int, size: int, lines: Sequence[int]) -> torch.Tensor:
            """Where each head has `size` outputs, of the lines from these on."""
            bands = [slice(head * width, head * width + size) for head in range(self._heads)]
            return torch.from_numpy(tiles_of(bands, lines)).to(placement.device)

        self._of_keys = tiles(latent.width, latent.rank, [0] * self._heads)
        self._of_values = tiles(latent.value_dim, latent.value_dim, range(latent.nope_dim, part.outputs, of_head))
        self._of_made = tiles(of_head, of_head, range(0, part.outputs, of_head))
        self._of_made[:, 0] = 0  # no head has an A of its own

    def of(self, rows: AdapterRows) -> LatentAdapters | None:
        """For the tokens of a step."""
        if not self.rank:
            return None
        nope_dim, heads, (down, up) = self._latent.nope_dim, self._heads, (self._down[:, 0], self._up[:, 0])
        by_head, ranks = up.view(len(up), heads, -1, self.rank), self.ranks.expand(-1, heads)
        thin = by_head[:, :, :nope_dim].transpose(2, 3), down[:, 0].transpose(1, 2)
        keys = AdapterStack(*thin, ranks, self._of_keys, step=nope_dim + self._latent.rope_dim)
        values = AdapterStack(down.expand(-1, heads, -1, -1), up, ranks, self._of_values, step=self._latent.rank)

        def made(own: slice) -> AdapterStack:
            lines = by_head[:, own].flatten(1, 2)
            tiles = self._of_made[: len(self._of_made) * lines.shape[1] // up.shape[1]]
            return AdapterStack(down, lines, self.ranks, tiles)

        return LatentAdapters(self._placement.ops.lora_, rows, made, keys, values)


class PackedLatents(LatentThin):
    """The same for the native CPU kernels, which know the absorbed form alone: a slot has copies of the parts."""

    def __init__(self, slots: int, latent: LatentConfig, heads: slice, placement: Placement) -> None:
        super().__init__(latent, heads, placement)
        self.rank = MAX_RANK
        # Of queries and what they become, and of what these find, which is as wide as latents, and the results:
        # numbers of a head that are multiplied, and numbers from head to head.
        sizes = {
            "keys": (latent.nope_dim, latent.rank, latent.nope_dim + latent.rope_dim, latent.width),
            "values": (latent.rank, latent.value_dim, latent.width, latent.value_dim),
        }
        self._packed: dict[str, PackedThin] = {}
        for name, (inputs, outputs, step, width) in sizes.items():
            thin = self._packed[name] = PackedThin(slots, inputs, [Part(name, outputs, ())], placement, self._heads)
            bands = np.arange(self._heads + 1) * width
            thin.packed = thin.packed._replace(bands=bands, step=step, gap=width - outputs)

    def of(self, rows: AdapterRows) -> LatentAdapters:
        add, stacks = cast(PackedOps, self._placement.ops).packed_lora, [thin.packed for thin in self._packed.values()]
        return LatentAdapters(lambda y, x, stack, _: add(y, x, stack, 1.0), rows, cast(Any, None), *stacks)

    def place(self, slot: int, adapter: Adapter) -> Iterator[int]:
        parts: Adapter = {}
        for down, up in (adapter[name] for name, *_ in self.matrices() if name in adapter):
            whole, rank, nope_dim = up.transpose(1, 2).flatten(0, 1), up.shape[-2], self._latent.nope_dim
            by_head = whole[: self._parts[0].outputs].view(self._heads, -1, rank)
            down = down.transpose(1, 2).flatten(0, 1)[:rank]
            parts = {"keys": (by_head[:, :nope_dim].transpose(1, 2), down.T), "values": (down, by_head[:, nope_dim:])}
        tiles = {name: (to_tiles(down), to_tiles(up)) for name, (down, up) in parts.items()}
        for thin in self._packed.values():
            yield from thin.place(slot, tiles)


class AdapterSlots:
    """The layers of one model that adapters may change."""

    def __init__(self, slots: int, *, experts: bool = True) -> None:
        """`experts`: those may be changed, too."""
        self.count, self.rank, self._experts = slots, 0, experts  # there is memory for this rank
        self._weights: list[ThinMatrices] = []
        self._rare: list[AdaptedExperts | AdaptedTable] = []  # whose memory is taken when some adapter changes them
        self._ranks: torch.Tensor | None = None  # [slots, matrices of all layers] int32
        self._packed = False  # for native kernels, which need no memory in slots

    def over(self, weight: WeightMaker, table: TableMaker, experts: ExpertsMaker) -> Makers:
        """The scheme, with adapters over its weights."""
        adapted = partial(self._make_experts, experts) if self._experts else experts
        return partial(self._make_weight, weight), partial(self._make_table, table), adapted

    def _thin(self, inputs: int, parts: Sequence[Part], placement: Placement, experts: int = 0) -> ThinMatrices:
        if not isinstance(placement.ops, PackedOps):
            return ThinMatrices(inputs, parts, placement, experts)
        self._packed = True
        return PackedThin(self.count, inputs, parts, placement, experts)

    def latents(self, latent: LatentConfig, heads: slice, placement: Placement) -> LatentThin:
        """What adapters change in the latent attention of a layer with these heads."""
        packed = isinstance(placement.ops, PackedOps)
        thin = PackedLatents(self.count, latent, heads, placement) if packed else LatentThin(latent, heads, placement)
        self._weights.append(thin)
        return thin

    def form(self, matrix: torch.Tensor) -> torch.Tensor:
        """A thin matrix as slots take it."""
        return to_tiles(matrix) if self._packed else matrix.contiguous()

    def _make_weight(
        self, make: WeightMaker, in_features: int, parts: Sequence[Part], bias: bool, placement: Placement
    ) -> LinearWeight:
        self._weights.append(self._thin(in_features, parts, placement))
        return AdaptedWeight(make(in_features, parts, bias, placement), self._weights[-1], placement)

    def _make_table(self, make: TableMaker, vocab_size: int, hidden_size: int, placement: Placement) -> TableWeight:
        thin = partial(self._thin, placement=placement)
        table = AdaptedTable(make(vocab_size, hidden_size, placement), vocab_size, hidden_size, thin)
        self._rare.append(table)
        return table

    def _make_experts(
        self, make: ExpertsMaker, hidden_size: int, moe: MoEConfig, placement: Placement
    ) -> ExpertWeights:
        if moe.latent_size:  # the router reads what is wider; these cannot be changed
            return make(hidden_size, moe, placement)
        alone = replace(moe, shared_size=0)  # those that every token passes are then a layer of their own
        thin = partial(self._thin, placement=placement)
        experts = AdaptedExperts(make(hidden_size, alone, placement), hidden_size, moe, placement, thin)
        self._rare.append(experts)
        return experts

    def _all(self) -> list[ThinMatrices]:
        return [*self._weights, *(thin for rare in self._rare for thin in rare.thin)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Outputs and inputs of each matrix, and how many experts have one."""
        return {name: shape for thin in self._all() for name, shape in thin.shapes().items()}

    def share(self, adapter: Adapter) -> Adapter:
        """This rank's part of an adapter for the whole model, cut as its matrices are: of `up` the outputs, of `down`
        the inputs that are here. Every rank of a stage has all of the model's ends that the stage has."""
        cuts = {name: index for thin in self._all() for name, _, index in thin.matrices()}
        here = {name: both for name, both in adapter.items() if name in cuts}
        return {name: (down[..., cuts[name][1]], up[..., cuts[name][0], :]) for name, (down, up) in here.items()}

    def lacks(self, adapter: Adapter) -> bool:
        """Whether there is no memory for it yet."""
        if self._packed:
            return False
        rank = max((down.shape[-2] for down, _ in adapter.values()), default=1)
        return rank > self.rank or any(not thin.rank and thin.named_in(adapter) for thin in self._all())

    def reserve(self, rank: int, names: Collection[str] = ()) -> None:
        """Takes memory in all slots for adapters of at least this rank, in the place of what there is: for linear
        layers, and for what else is in `names`."""
        self.rank, every = max(LEAST_RANK, 1 << (rank - 1).bit_length(), self.rank), self._all()
        for number, thin in enumerate(every):
            wanted = number < len(self._weights) or thin.rank or thin.named_in(names)
            if self._ranks is None or (wanted and thin.rank < self.rank):
                thin.reserve(self.count, self.rank if wanted else 0)
        if self._ranks is None:
            counts = [len(thin.matrices()) for thin in every]
            self._ranks = torch.zeros(self.count, sum(counts), dtype=torch.int32, device=every[0].stack.up.device)
            for thin, ranks in zip(every, torch.split(self._ranks, counts, dim=1), strict=True):
                thin.ranks = ranks

    def place(self, slot: int, adapter: Adapter) -> None:
        """Copies an adapter into the slot."""
        ranks = [rank for thin in self._all() for rank in thin.place(slot - 1, adapter)]
        if self._ranks is not None:
            self._ranks[slot - 1].copy_(torch.tensor(ranks, dtype=torch.int32), non_blocking=True)


class AdaptedWeight(LinearWeight):
    """The weight of a layer, and what each slot adds to it."""

    def __init__(self, weight: LinearWeight, thin: ThinMatrices, placement: Placement) -> None:
        self._weight, self._thin, self._ops = weight, thin, placement.ops

    def linear(self, x: Rows, ctx: ForwardContext) -> torch.Tensor:
        product = self._weight.linear(x, ctx)
        if ctx.adapters is not None:
            x = x if isinstance(x, torch.Tensor) else x.dequantize().to(product.dtype)
            self._thin.add_step_(product, x, ctx)
        return product

    def after_norm(self, inputs: NormedSum, ctx: ForwardContext) -> WithSum:
        return self._weight.after_norm(inputs, ctx) if ctx.adapters is None else super().after_norm(inputs, ctx)

    def gated_after_norm(self, inputs: NormedSum, activation: Activation, gate: Gate, ctx: ForwardContext) -> GatedRows:
        if ctx.adapters is None:
            return self._weight.gated_after_norm(inputs, activation, gate, ctx)
        gate_up, total = self.after_norm(inputs, ctx)
        # Not as the next weight would have it: its adapters are to multiply what was not rounded.
        return super().gate(gate_up, activation), total

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> Rows:
        return self._weight.gate(gate_up, activation)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        self._thin.prefix = prefix
        yield from self._weight.slots(prefix)


class AdaptedExperts(ExpertWeights):
    """The experts of a layer, and what each slot adds to them, to their router, and to the gate of shared ones."""

    has_shared = False

    def __init__(
        self, weight: ExpertWeights, hidden_size: int, moe: MoEConfig, placement: Placement, thin: ThinMaker
    ) -> None:
        self._weight, self._ops = weight, placement.ops
        held = placement.topology.in_expert.slice_of(moe.intermediate_size, "moe_intermediate_size")
        inner = held.stop - held.start
        parts = [Part(name, inner, (held,)) for name in moe.inputs]
        self._gate_up = thin(hidden_size, parts, experts=moe.experts)
        self._down = thin(inner, [Part("down_proj", hidden_size, (WHOLE, held))], experts=moe.experts)
        self.router = thin(hidden_size, [Part("gate", moe.experts, (WHOLE,))])
        self.shared_gate = thin(hidden_size, [Part("shared_expert_gate", 1, (WHOLE,))])
        self.thin = [self._gate_up, self._down, self.router]
        if isinstance(weight, PackedExperts):  # whose operation does it all
            weight.adapters = [cast(PackedThin, thin).packed for thin in self.thin]
        self.thin += [self.shared_gate] * moe.shared_gate

    def __call__(self, x: torch.Tensor, router: Router, activation: Activation, ctx: ForwardContext) -> torch.Tensor:
        if not self._changed(ctx):
            return self._weight(x, router, activation, ctx)
        logits = self._ops.router_logits(x, router.weight)
        if router.logit_bias is not None:
            logits = logits + router.logit_bias
        self.router.add_step_(logits, x, ctx)
        return self._by_changed(x, logits, ctx, router.bias, activation)

    def by_logits(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        scale: torch.Tensor | None,
        activation: Activation,
        ctx: ForwardContext,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not self._changed(ctx):
            return self._weight.by_logits(x, logits, scale, activation, ctx, bias)
        return self._by_changed(x, logits, ctx, bias, activation, scale)

    def _by_changed(
        self, x: torch.Tensor, logits: torch.Tensor, ctx: ForwardContext, bias: torch.Tensor | None, *rest: Any
    ) -> torch.Tensor:
        assert ctx.adapters is not None
        rows, kept, sums = ctx.adapters.among(len(x), ctx.logits_indices), cast(MatrixExperts, self._weight), []
        for tokens, own, slots in zip(
            *(torch.split(each, MOST_TOKENS) for each in (x, logits, rows.slots)), strict=True
        ):
            matrices = kept.matrices._replace(adapted=PairAdapters(self._gate_up.stack, self._down.stack, slots))
            sums.append(self._ops.experts_by_logits(tokens, own, bias, kept.moe, matrices, *rest))
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def after_norm(self, inputs: NormedSum, router: Router, activation: Activation, ctx: ForwardContext) -> WithNorm:
        if not self._changed(ctx):
            return self._weight.after_norm(inputs, router, activation, ctx)
        return super().after_norm(inputs, router, activation, ctx)

    def _changed(self, ctx: ForwardContext) -> bool:
        packed = isinstance(self._weight, PackedExperts)
        return ctx.adapters is not None and not packed and any(thin.rank for thin in self.thin)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        self._gate_up.prefix = self._down.prefix = prefix
        self.router.prefix = self.shared_gate.prefix = prefix.removesuffix("experts.")
        yield from self._weight.slots(prefix)


class AdaptedTable:
    """A vocabulary, and what adapters add to it where tokens become vectors and where hidden states become logits."""

    def __init__(self, table: TableWeight, vocab_size: int, hidden_size: int, thin: ThinMaker) -> None:
        self._table = table
        self._embedding = thin(vocab_size, [Part("", hidden_size, (WHOLE,))])
        self._head = thin(hidden_size, [Part(HEAD, vocab_size, (WHOLE,))])
        self.thin: list[ThinMatrices] = []  # that can be changed, once the table has a name

    def embed(self, token_ids: torch.Tensor, scale: float, adapters: AdapterRows | None = None) -> torch.Tensor:
        vectors = self._table.embed(token_ids, scale)
        if adapters is not None and self._embedding.rank:
            self._embedding.add_columns_(vectors, token_ids, scale, adapters.tokens)
        return vectors

    def logits(self, hidden: torch.Tensor, adapted: AdaptedRows | None = None) -> torch.Tensor:
        logits = self._table.logits(hidden)
        if adapted is not None and self._head.rank:
            self._head.add_(logits, hidden, adapted())
        return logits

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        name = self._embedding.prefix = prefix.removesuffix(".")
        self.thin = [self._embedding] * (name != HEAD) + [self._head] * (name in (HEAD, EMBEDDING))
        yield from self._table.slots(prefix)
