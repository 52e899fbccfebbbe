"""Self-attention as a layer: projections, head norms, rotation and the storing of keys and values, around a back end.

The layer owns weights; keys and values of requests live in the pool, and which of them are read is the back end's
business.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from bough.attention.base import AttentionSpec
from bough.attention.context import ForwardContext
from bough.core.model_config import ModelConfig
from bough.kernels.norm_rope_store.reference import QKNormRope, norm_rope_store_
from bough.kernels.ops import WithSum
from bough.layers.linear import ColumnLinear, Columns, Products, RowLinear, features
from bough.layers.norm import Inputs, RmsNorm
from bough.layers.placement import Placement
from bough.layers.weights import WeightSlot


class SelfAttention(Products):
    """Attention of one layer, with this rank's share of the heads."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement, inputs: int | None = None) -> None:
        """`inputs` are the columns of what it is given, where these are not hidden states alone."""
        inputs = config.hidden_size if inputs is None else inputs
        (all_kv_heads, head_dim), source = config.kv_shape(layer), config.kv_source(layer)
        query_heads = placement.topology.slice_of(config.num_heads, "num_heads")
        kv_heads = placement.topology.kv_slice_of(all_kv_heads)
        query = Columns("q_proj", features(query_heads, head_dim))
        key = Columns("k_proj", features(kv_heads, head_dim))
        value = key if config.full_keys_as_values and not config.slides(layer) else Columns("v_proj", key.held)
        self._shares = config.causal and source != layer  # another layer's keys and values: it has queries alone
        columns = (query,) if self._shares else (query, key, value)
        self._qkv = ColumnLinear(inputs, columns, config.qkv_bias, placement)
        self._gate: ColumnLinear | None = None
        if config.attention_gate:
            self._gate = ColumnLinear(inputs, (Columns("gate_proj", query.held),), config.qkv_bias, placement)
        self._output = RowLinear("o_proj", query.held, config.hidden_size, config.output_bias, placement)
        self._norms: tuple[RmsNorm, RmsNorm] | None = None
        if config.qk_norm:
            settings = (config.norm_eps, config.norm_plus_one, placement)
            if config.qk_norm_whole:
                self._norms = (RmsNorm(query.size, *settings, query.held), RmsNorm(key.size, *settings, key.held))
            else:
                self._norms = (RmsNorm(head_dim, *settings), RmsNorm(head_dim, *settings))
        self._shares_norms = config.qk_norm_whole and placement.topology.tp_size > 1
        self._mean_of_ranks, self._ops = placement.mean_of_ranks, placement.ops
        self._query_heads = query_heads
        window = config.sliding_window if config.slides(layer) else None
        self._spec = AttentionSpec(
            layer=layer,
            scale=head_dim**-0.5 if config.query_scale is None else config.query_scale,
            window=window,
            chunked=config.chunked and window is not None,
            causal=config.causal,
            one_way=config.media is not None and config.media.whole_in_windows and window is None,
            group=config.kv_group(layer),
            softcap=config.attention_softcap,
            heads=query.size // head_dim,
            kv_heads=key.size // head_dim,
            head_dim=head_dim,
            sinks=placement.empty(query.size // head_dim) if config.attention_sinks else None,
        )
        self._spec_of_ends = replace(self._spec, ends_only=True)
        unrotated = bool(config.unrotated_layers) and config.unrotated_layers[layer]
        rope = placement.rope(config.rope_of(layer), head_dim, config.positions)
        query_norm, key_norm = (None, None) if self._norms is None or self._shares_norms else self._norms
        unit = torch.ones_like(placement.empty(head_dim)) if config.qk_unit_norm and not unrotated else None
        self._qk_norm_rope = QKNormRope(
            unit if query_norm is None else query_norm.rms.weight,
            unit if key_norm is None or self._shares else key_norm.rms.weight,
            config.norm_eps,
            config.norm_plus_one,
            rope.cos,
            rope.sin,
        )
        self._growth = config.query_growth if unrotated or not any(config.unrotated_layers) else None
        normalises = config.value_norm and not self._shares
        self._value_weight = torch.ones_like(placement.empty(head_dim)) if normalises else None
        # Kernels rotate whole heads, by one position, after norms of single heads.
        self._has_kernels = rope.cos.shape[1] * 2 == head_dim and not (config.qk_norm_whole or config.qk_norm_last)
        self._norm_rope_store_ = placement.ops.norm_rope_store_
        self._axes = rope.axes
        if not self._has_kernels:
            any_heads = self._norm_rope_store_ if placement.ops.any_heads else norm_rope_store_
            self._norm_rope_store_ = partial(any_heads, axes=rope.axes, norm_last=config.qk_norm_last)

    def __call__(self, inputs: Inputs, ctx: ForwardContext) -> WithSum:
        """Attends with the norm of x + residual; returns the result and that sum, at `ctx.logits_indices`."""
        spec, positions = self._spec if ctx.logits_indices is None else self._spec_of_ends, ctx.batch.positions
        gate = None
        if self._gate is not None:  # a product of its own: kernels take queries, keys and values without a gap
            normed, total = inputs.taken(ctx)
            gate, qkv = self._gate(normed, ctx), self._qkv(normed, ctx)
        else:
            qkv, total = self._qkv.after(inputs, ctx)
        qkv = qkv.view(qkv.shape[0], -1, spec.head_dim)
        if self._shares_norms:
            self._normalise_whole(qkv, spec)
        if self._growth is not None:
            self._ops.grow_queries_(qkv, spec.heads, positions, *self._growth)
        if self._value_weight is not None:
            values = qkv[:, -spec.kv_heads :]
            values.copy_(self._ops.rms_norm(values, self._value_weight, self._qk_norm_rope.eps)[0])
        ctx.wait_for(spec.layer)
        attended = None
        if self._has_kernels and not self._shares and positions.dim() == 1:
            attended = ctx.attention.run_projected(qkv, self._qk_norm_rope, spec, ctx.pool)
        if attended is None:
            attended = self._rotate_and_run(qkv, spec, ctx)
        attended = attended.flatten(1)
        if gate is not None:
            attended = attended * gate.sigmoid()
        if ctx.logits_indices is not None:
            attended, total = (self._ops.take_rows(rows, ctx.logits_indices) for rows in (attended, total))
        return self._output(attended, ctx), total

    def _normalise_whole(self, qkv: torch.Tensor, spec: AttentionSpec) -> None:
        """Normalises all query heads at once, and all key heads, of which each rank has as many as the others."""
        assert self._norms is not None
        parts = torch.split(qkv, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)[:2]
        wide = [part.flatten(1).float() for part in parts]
        squares = self._mean_of_ranks(torch.stack([part.pow(2).mean(1) for part in wide], dim=1))
        lengths = torch.rsqrt(squares + self._qk_norm_rope.eps)
        for place, (part, norm) in enumerate(zip(parts, self._norms, strict=True)):
            weight = norm.rms.weight.float() + norm.rms.plus_one
            part.copy_((wide[place] * lengths[:, place, None] * weight).view(part.shape))

    def _rotate_and_run(self, qkv: torch.Tensor, spec: AttentionSpec, ctx: ForwardContext) -> torch.Tensor:
        """One operation after the other."""
        pool, kv_heads = ctx.pool, 0 if self._shares else spec.kv_heads
        turns, positions, slots = self._qk_norm_rope, ctx.batch.positions, ctx.batch.slots[spec.group]
        if positions.dim() > 1 and self._has_kernels:
            turns, positions = ctx.turned(turns, self._axes)
        # All keys and values of the step are stored before any row attends: a row may read pages that another row of
        # the same step writes (see `bough.core.plan`).
        places = (positions, slots, *spec.caches(pool), pool.key_scales[spec.layer], pool.value_scales[spec.layer])
        self._norm_rope_store_(qkv, spec.heads, kv_heads, turns, *places)
        if self._shares:
            q, k, v = qkv, *pool.read_tokens(spec.layer, slots, qkv.dtype)
        else:
            q, k, v = torch.split(qkv, [spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
        return ctx.attention.run(q, k, v, spec, pool)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().slots(prefix)
        if self._norms is not None:
            yield from self._norms[0].slots(f"{prefix}q_norm.")
        if self._norms is not None and not self._shares:
            yield from self._norms[1].slots(f"{prefix}k_norm.")
        if self._spec.sinks is not None:
            yield WeightSlot(f"{prefix}sinks", self._spec.sinks, (self._query_heads,))
