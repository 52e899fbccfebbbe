"""The seam between layers and attention back ends.

A back end is prepared once a step, outside the forward pass (so that a captured graph need not contain it), and then
run once for each layer. It owns what it derives from the batch; the cache belongs to the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from bough.attention.batch import AttentionBatch
from bough.core.errors import ModelError
from bough.core.model_config import LatentConfig
from bough.kernels.lora.reference import AdapterRows, AdapterStack, GroupedRows, Tokens
from bough.kernels.norm_rope_store.reference import QKNormRope
from bough.memory.pools.kv_pool import KVPool

Reading = tuple[int | None, bool, int, int]  # window, of which kind; key-value heads and their width


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What is constant about one layer's attention on this rank."""

    layer: int  # index into the pool
    scale: float
    window: int | None  # tokens a query sees at most, its own included; None: all. Both ways: on each side
    softcap: float | None  # scores become softcap * tanh(score / softcap)
    heads: int
    kv_heads: int
    head_dim: int
    group: int = 0  # of the layer's keys and values: which page table and which slots are its own
    ends_only: bool = False  # only each row's last token is looked at: what a back end gives for others may be anything
    chunked: bool = False  # the window is one of those that stand side by side, not one that ends with the query
    causal: bool = True  # False: queries see keys behind them too
    one_way: bool = False  # also of items whose tokens see those behind them in other layers
    sinks: torch.Tensor | None = None  # [heads] a logit that joins each softmax and has no value

    @property
    def reading(self) -> Reading:
        """Layers in which it is the same read by one plan."""
        return self.window, self.chunked, self.kv_heads, self.head_dim

    def caches(self, pool: KVPool) -> tuple[torch.Tensor, torch.Tensor]:
        """The stored keys and values of the layer."""
        return pool.keys[self.layer], pool.values[self.layer]

    def scores(self, pool: KVPool) -> dict[str, Any]:
        """How kernels make scores of the layer's queries and stored keys, and results of the values."""
        scales = {"k_scale": pool.key_scales[self.layer], "v_scale": pool.value_scales[self.layer]}
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap, "sinks": self.sinks, **scales}

    @property
    def writes_scores(self) -> bool:
        """Whether scores are computed one by one, because no library has the layer's kind of softmax."""
        return self.softcap is not None or self.sinks is not None


class LatentAdapters(NamedTuple):
    """What adapters add to one layer's latent attention. In the expanded form it is added to keys and values, which
    are products of latents; in the absorbed form head by head to the queries, and to what is made of the results."""

    add_: Callable[[torch.Tensor, torch.Tensor, Any, GroupedRows], None]
    rows: AdapterRows
    made: Callable[[slice], AdapterStack]  # adds to keys and values of these heads, of latents
    keys: Any  # adds to queries that attend to latents, of the model's queries
    values: Any  # adds to results, of sums of latents

    def change(self, product: torch.Tensor, x: torch.Tensor, stack: Any, tokens: Tokens) -> torch.Tensor:
        """The product [tokens, heads, outputs], with what is added of x [tokens, heads, inputs]."""
        flat = product.flatten(1)
        self.add_(flat, x.flatten(1), stack, self.rows.at(tokens))
        return flat.view(product.shape)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """What is constant about one layer's latent attention on this rank.

    It is computed in either of two forms. Expanded, every head has keys and values of its own, products of the
    latents. Absorbed, the queries are multiplied with the keys' matrix instead and attend to the latents themselves,
    which all heads share; what they find is multiplied with the values' matrix.
    """

    layer: int  # index into the pool
    scale: float
    latent: LatentConfig
    weight: torch.Tensor  # [heads, nope_dim + value_dim, rank]: of each head the keys' rows, then the values'
    group: int = 0
    ends_only: bool = False  # as in `AttentionSpec`
    adapted: LatentAdapters | None = None  # what adapters add in this step; None: nothing

    @property
    def heads(self) -> int:
        return int(self.weight.shape[0])

    @property
    def top(self) -> int | None:
        """Tokens that a query attends to; None: all that it sees."""
        return None if self.latent.index is None else self.latent.index.top

    @property
    def absorbed(self) -> AttentionSpec:
        return self._as_plain(self.heads, 1, self.latent.width)

    def expanded(self, heads: int) -> AttentionSpec:
        """Of so many of the heads."""
        return self._as_plain(heads, heads, self.latent.nope_dim + self.latent.rope_dim)

    def _as_plain(self, heads: int, kv_heads: int, head_dim: int) -> AttentionSpec:
        return AttentionSpec(self.layer, self.scale, None, None, heads, kv_heads, head_dim, self.group, self.ends_only)

    def with_keys(self, absorbed: torch.Tensor, q: torch.Tensor, tokens: Tokens = slice(None)) -> torch.Tensor:
        """Queries that attend to latents, with what the adapters of these tokens add to the keys' matrices."""
        return absorbed if self.adapted is None else self.adapted.change(absorbed, q, self.adapted.keys, tokens)

    def with_values(self, out: torch.Tensor, attended: torch.Tensor, tokens: Tokens = slice(None)) -> torch.Tensor:
        """Results of such queries, with what the adapters of these tokens add to the values' matrices."""
        return out if self.adapted is None else self.adapted.change(out, attended, self.adapted.values, tokens)

    def expand(self, latents: torch.Tensor, heads: slice, tokens: Tokens) -> torch.Tensor:
        """Keys and values that these heads have of latents [keys, rank + rope_dim]; each has the adapter of one of the
        step's `tokens`. [keys, heads, nope_dim + value_dim]"""
        weight, latents = self.weight[heads], latents[:, : self.latent.rank]
        made = F.linear(latents, weight.flatten(0, 1))
        if self.adapted is not None:
            self.adapted.add_(made, latents, self.adapted.made(heads), self.adapted.rows.at(tokens))
        return made.view(len(latents), *weight.shape[:2])

    def worth_expanding(self, queries: int) -> bool:
        """Whether a row of so many queries is computed faster in the expanded form: expanding takes as long for one
        query as for many, and each then multiplies shorter rows."""
        latent = self.latent
        per_head = latent.nope_dim + latent.value_dim
        return queries * (2 * latent.rank - per_head) > per_head * latent.rank

    def head_parts(self, keys: int, most: int) -> list[slice]:
        """The heads in parts, of each of which the expanded keys and values are at most `most` numbers."""
        latent = self.latent
        of_head = keys * (latent.nope_dim + latent.rope_dim + latent.value_dim)
        size = max(1, most // max(1, of_head))
        return [slice(first, min(first + size, self.heads)) for first in range(0, self.heads, size)]


class IndexQueries(NamedTuple):
    """By which a layer with sparse attention chooses tokens, of all tokens of a step; the keys are in the pool."""

    q: torch.Tensor  # [tokens, heads, head_dim]
    weights: torch.Tensor  # [tokens, heads]

    def cut(self, part: slice) -> IndexQueries:
        return IndexQueries(self.q[part], self.weights[part])


class AttentionBackend(Protocol):
    """Causal attention over a paged pool."""

    def prepare(self, batch: AttentionBatch) -> None:
        """Takes the batch that the following `run` calls are about."""
        ...

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor:
        """Attends with q [tokens, heads, head_dim] and gives the same shape back, contiguous.

        The keys and values of all tokens of the step stand in the pool already; k and v [tokens, kv_heads, head_dim]
        are the same once more, side by side, for back ends that would rather not look them up. The three may be views
        of one tensor.
        """
        ...

    def run_latent(
        self, q: torch.Tensor, latents: torch.Tensor, layer: LatentSpec, pool: KVPool, index: IndexQueries | None = None
    ) -> torch.Tensor:
        """Attends with q [tokens, heads, nope_dim + rope_dim] and gives [tokens, heads, value_dim] back, contiguous.

        The latents of all tokens of the step stand in the pool already; `latents` [tokens, width] are the same once
        more. Both may be strided in their first dimension. Where the attention is sparse, a layer that has no `index`
        takes the tokens that the layer before it chose.
        """
        raise ModelError(f"{type(self).__name__} has no latent attention; choose another attention back end.")

    def run_projected(
        self, qkv: torch.Tensor, qk_norm_rope: QKNormRope, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor | None:
        """All that stands between the projection and the output at once: QK norm and RoPE of qkv [tokens, heads +
        2 * kv_heads, head_dim], storing keys and values, and attention. None where that has no kernel of its own;
        nothing is done then, and the caller takes one step after the other."""
        return None
