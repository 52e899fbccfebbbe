"""What a forward pass needs beside weights and tokens. It is passed as an argument: nothing is global."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from bough.attention.base import AttentionBackend
from bough.attention.batch import AttentionBatch
from bough.kernels.lora.reference import AdapterRows, GroupedRows
from bough.kernels.norm_rope_store.reference import QKNormRope, angles_of
from bough.memory.pools.kv_pool import KVPool

Heard = tuple[torch.Tensor, ...]  # of each layer [2, heads, positions, head_dim]: keys and values of a recording

AdaptedRows = Callable[[], GroupedRows]  # of hidden states; only heads that adapters change call it


@dataclass(frozen=True, slots=True)
class MediaRows:
    """What encoders have made of images and the like, laid out by the step's tokens: graphs have it in buffers."""

    here: torch.Tensor  # [tokens, 1] bool, which tokens are of media
    rows: torch.Tensor  # [1 + deep layers, tokens, hidden]: their vectors, and what the first layers add to them


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step. Whoever builds it has already called `attention.prepare(batch)`."""

    attention: AttentionBackend
    pool: KVPool
    batch: AttentionBatch
    logits_indices: torch.Tensor | None = None  # [n] last tokens of rows, all that is asked for; None: every token
    # The hidden states before some layers, for a draft model that reads them: by layer, each put in place of None.
    tapped: dict[int, torch.Tensor | None] | None = None
    adapters: AdapterRows | None = None  # None: all rows compute with the model's own weights
    media: MediaRows | None = None
    heard: tuple[Heard, ...] = ()  # of each row of the batch, of a model that hears
    # Of rows that align, by their places: what each layer's chosen heads attend to. [heads, tokens, positions]
    aligned: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    # Called by a layer before it reads the pool, where copies of pages may be under way.
    wait_for: Callable[[int], None] = lambda layer: None
    turns: dict[torch.Tensor, tuple[torch.Tensor, ...]] = field(default_factory=dict)  # by the table, see `turned`

    def turned(self, rope: QKNormRope, axes: torch.Tensor | None) -> tuple[QKNormRope, torch.Tensor]:
        """Where pairs rotate by positions on several axes: the angles of each token, once for all layers, as a table of
        its own, and the lines of tokens there."""
        if rope.cos not in self.turns:
            turns = angles_of(rope.cos, rope.sin, self.batch.positions, axes)  # of each pair twice, the second unsigned
            cos, sin = (each[:, 0, -rope.cos.shape[1] :] for each in turns)
            lines = torch.arange(len(cos), device=cos.device)
            self.turns[rope.cos] = cos.contiguous(), sin.contiguous(), lines  # as kernels read a table
        cos, sin, lines = self.turns[rope.cos]
        return rope._replace(cos=cos, sin=sin), lines
