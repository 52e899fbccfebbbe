"""A back end made of the kernels' plain references: slow, and right for a pool in any number format."""

from __future__ import annotations

import torch

from bough.attention.base import AttentionBackend, AttentionSpec
from bough.attention.batch import AttentionBatch
from bough.memory.pools.kv_pool import KVPool
from tests.kernels.references.paged_attention import decode_attention, prefill_attention


class ReferenceAttention(AttentionBackend):
    """Reads as the GPU's back end does: decodes all from the pool, others the prefix alone."""

    def __init__(self) -> None:
        self._batch: AttentionBatch | None = None

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None
        n = batch.decodes
        caches = (pool.keys[layer.layer], pool.values[layer.layer], batch.page_tables[layer.group])
        options = {
            "page_size": batch.page_size,
            "scale": layer.scale,
            "window": layer.window,
            "softcap": layer.softcap,
            "k_scale": pool.key_scales[layer.layer],
            "v_scale": pool.value_scales[layer.layer],
        }
        out = torch.empty(q.shape, dtype=q.dtype)
        starts = torch.from_numpy(batch.query_starts[n:] - batch.query_starts[n])
        context = torch.from_numpy(batch.context_lens[n:])
        decode_attention(q[:n], *caches, batch.rows[:n], batch.lengths[:n], None, out=out[:n], **options)  # type: ignore[arg-type]
        fresh = (q[n:], k[n:], v[n:])
        prefill_attention(*fresh, *caches, batch.rows[n:], starts, context, None, out=out[n:], **options)  # type: ignore[arg-type]
        return out
