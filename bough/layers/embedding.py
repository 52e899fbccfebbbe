"""The two ends of a model: token ids to vectors, and vectors to logits or to scores of labels. And what a layer gets of
each token beside the hidden states, and what it does with that behind its block (Gemma 4)."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from bough.attention.context import AdaptedRows, ForwardContext
from bough.core.model_config import ModelConfig
from bough.layers.adapters import AdaptedTable
from bough.layers.linear import ColumnLinear, Columns, Products
from bough.layers.norm import Inputs, RmsNorm, make_norm
from bough.layers.placement import Placement
from bough.layers.schemes.base import TableWeight
from bough.layers.weights import WeightSlot, slots_of


class Embedding:
    """A vector for each token, times `scale`."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float, placement: Placement) -> None:
        self.table = placement.make_table(vocab_size, hidden_size, placement)
        # Models with a scale were trained with it rounded to the type of the weights.
        self._scale = float(torch.tensor(scale, dtype=placement.dtype))

    def __call__(self, token_ids: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        rows = (ctx.adapters,) if isinstance(self.table, AdaptedTable) else ()
        return self.table.embed(token_ids, self._scale, *rows)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.table.slots(prefix)


class PlaceTable:
    """What is added to a token's vector for its position and its type: one line for each pair, the positions of the
    second type behind those of the first. Models that rotate have the first type's vector at every position."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        width, self._learned = config.hidden_size, config.learned_positions
        self.table = placement.empty(config.positions, width)
        self._types = torch.zeros_like(placement.empty(config.token_types or 1, width))
        self._positions = torch.zeros_like(self.table[: config.context_length]) if config.token_types else self.table

    def _store(self, target: torch.Tensor) -> Callable[[int, torch.Tensor], None]:
        def store(first: int, band: torch.Tensor) -> None:
            target[first : first + len(band)].copy_(band)
            if target is not self.table:
                by_type = self.table.view(-1, *self._positions.shape)
                torch.add(self._positions, self._types[: len(by_type), None], out=by_type)

        return store

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self._learned:
            rows = (slice(0, len(self._positions)),)
            yield WeightSlot(f"{prefix}embed_positions.weight", self._positions, rows, self._store(self._positions))
        if self._positions is not self.table:
            yield WeightSlot(f"{prefix}embed_types.weight", self._types, store=self._store(self._types))


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

    def __call__(self, hidden: torch.Tensor, adapted: AdaptedRows | None = None) -> torch.Tensor:
        table = self._table
        logits = table.logits(hidden, adapted) if isinstance(table, AdaptedTable) else table.logits(hidden)
        if self.bias is not None:
            logits = logits + self.bias
        if self._scale != 1.0:
            logits = logits * self._scale
        return logits if self._softcap is None else self._cap(logits, self._softcap)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._table.slots(prefix)


class LabelHead:
    """What classifiers and reward models have in the place of logits: a matrix over the pooled hidden states, behind a
    layer with an activation where the model has one. Small, so torch computes it, in float32."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        assert config.vectors is not None
        self._config, self._eps, width = config.vectors, config.norm_eps, config.hidden_size
        shapes = {"out.weight": (len(self._config.labels), width), "out.bias": (len(self._config.labels),)}
        shapes |= {"hidden.weight": (width, width), "hidden.bias": (width,), "norm.weight": (width,)}
        shapes |= {"0.weight": (width, width), "0.bias": (width,), "2.weight": (1, width), "2.bias": (1,)}
        self._weights = {name: placement.empty(*shapes[name]) for name in self._config.head}

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """[n, labels] of [n, hidden_size]"""
        weights = {name: weight.float() for name, weight in self._weights.items()}
        if "0.weight" in weights:  # of reward models, whose checkpoints number the layers
            pooled = F.relu(F.linear(pooled, weights["0.weight"], weights["0.bias"]))
            return F.linear(pooled, weights["2.weight"], weights["2.bias"])
        if "hidden.weight" in weights:
            pooled = F.linear(pooled, weights["hidden.weight"], weights.get("hidden.bias"))
            pooled = F.gelu(pooled) if "norm.weight" in weights else torch.tanh(pooled)
        if "norm.weight" in weights:
            pooled = F.layer_norm(pooled, pooled.shape[-1:], weights["norm.weight"], None, self._eps)
        return F.linear(pooled, weights["out.weight"], weights.get("out.bias"))

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        for name, weight in self._weights.items():
            yield WeightSlot(f"{prefix}{name}", weight)


class LayerInputs:
    """A vector for each layer and token: one that is looked up, and the norm of a product of the token's embedding."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self._shape = (config.num_layers, config.layer_inputs)
        width = config.num_layers * config.layer_inputs
        self._embedding = Embedding(config.vocab_size, width, config.layer_inputs**0.5, placement)
        columns = Columns("per_layer_model_projection", slice(0, width))
        self._product = ColumnLinear(config.hidden_size, (columns,), False, placement)
        # The product is divided by the root of its inputs, of which the norm leaves only the weight of epsilon.
        eps = config.norm_eps * config.hidden_size
        self._norm = RmsNorm(config.layer_inputs, eps, config.norm_plus_one, placement)

    def __call__(self, token_ids: torch.Tensor, embedded: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[tokens, layers, layer_inputs]"""
        product = self._product(embedded, ctx).view(-1, *self._shape)
        found = self._embedding(token_ids, ctx).view(-1, *self._shape)
        return (self._norm(product, None, ctx)[0] + found).mul_(0.5**0.5)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self._embedding.slots(f"{prefix}embed_tokens_per_layer.")
        yield from self._product.slots(prefix)
        yield from self._norm.slots(f"{prefix}per_layer_projection_norm.")


class LayerEnd(Products):
    """Adds a product of the layer's inputs, gated by the hidden states, and multiplies all with the layer's scale."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self._scale = placement.empty(1) if config.layer_scales else None
        self._ops, width = placement.ops, config.layer_inputs
        self._inputs = width > 0
        if self._inputs:
            gate, product = Columns("per_layer_input_gate", slice(0, width)), slice(0, config.hidden_size)
            self._gate = ColumnLinear(config.hidden_size, (gate,), False, placement)
            self._product = ColumnLinear(width, (Columns("per_layer_projection", product),), False, placement)
            self._norm = make_norm(config, placement)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, inputs: torch.Tensor | None, ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes and gives hidden states as a block does; `inputs` [tokens, layer_inputs]."""
        if inputs is not None:
            if ctx.logits_indices is not None:
                inputs = self._ops.take_rows(inputs, ctx.logits_indices)
            gate, residual = self._gate.after(Inputs(x, residual), ctx)
            gated = self._ops.gated_mul(torch.cat((gate, inputs), dim=-1), "gelu_tanh")
            x = self._norm(self._product(gated, ctx), None, ctx)[0]
        return (x, residual) if self._scale is None else (x * self._scale, residual * self._scale)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        if self._scale is not None:
            yield WeightSlot(f"{prefix}layer_scalar", self._scale)
        yield from super().slots(prefix)
        if self._inputs:
            yield from slots_of(prefix, post_per_layer_input_norm=self._norm)
