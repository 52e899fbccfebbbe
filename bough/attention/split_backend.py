"""Two back ends as one: the rows of a step that decode go to one, those that compute prompt tokens to the other.

Owns nothing but the two. Each sees its part of the step as a step of its own.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from bough.attention.base import AttentionBackend, AttentionSpec, IndexQueries, LatentSpec
from bough.attention.batch import AttentionBatch
from bough.kernels.norm_rope_store.reference import QKNormRope
from bough.memory.pools.kv_pool import KVPool


class SplitAttention(AttentionBackend):
    """Decodes stand first in every step, one token each, so its parts are two ranges of rows and of tokens."""

    def __init__(self, *, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self._prefill = prefill
        self._decode = decode
        self._decodes = 0

    def prepare(self, batch: AttentionBatch) -> None:
        n, rows = batch.decodes, len(batch.query_lens)
        self._decodes = n
        if n:
            self._decode.prepare(cut_rows(batch, 0, n))
        if n < rows:
            self._prefill.prepare(cut_rows(batch, n, rows))

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor:
        return self._run(len(q), lambda backend, part: backend.run(q[part], k[part], v[part], layer, pool))

    def run_latent(
        self, q: torch.Tensor, latents: torch.Tensor, layer: LatentSpec, pool: KVPool, index: IndexQueries | None = None
    ) -> torch.Tensor:
        def run(backend: AttentionBackend, part: slice) -> torch.Tensor:
            adapted = layer.adapted and layer.adapted._replace(rows=layer.adapted.rows.cut(part))
            own = replace(layer, adapted=adapted)
            return backend.run_latent(q[part], latents[part], own, pool, index and index.cut(part))

        return self._run(len(q), run)

    def _run(self, tokens: int, run: Callable[[AttentionBackend, slice], torch.Tensor]) -> torch.Tensor:
        parts = (self._decode, slice(0, self._decodes)), (self._prefill, slice(self._decodes, tokens))
        found = [run(backend, part) for backend, part in parts if part.stop > part.start]
        return torch.cat(found) if len(found) > 1 else found[0]

    def run_projected(
        self, qkv: torch.Tensor, qk_norm_rope: QKNormRope, layer: AttentionSpec, pool: KVPool
    ) -> torch.Tensor | None:
        return self._decode.run_projected(qkv, qk_norm_rope, layer, pool) if self._decodes == len(qkv) else None


def cut_rows(batch: AttentionBatch, first: int, last: int) -> AttentionBatch:
    """The rows first..last of a step, as a step."""
    if first == 0 and last == len(batch.query_lens):
        return batch
    begin, end = int(batch.query_starts[first]), int(batch.query_starts[last])
    return replace(
        batch,
        **{name: getattr(batch, name)[first:last] for name in ("rows", "lengths", "query_lens", "context_lens")},
        decodes=max(0, min(batch.decodes, last) - first),
        query_starts=batch.query_starts[first : last + 1] - begin,
        slots=tuple(slots[begin:end] for slots in batch.slots),
        positions=batch.positions[..., begin:end],
    )
