"""The persistent buffers of a captured step with prompts in it.

A graph's kernels read fixed addresses, so a step's arrays are packed on the host as that size's graph expects them and
copied in one go each, long and short integers. What a step does not fill is padding: tokens of page 0 that no row owns,
rows without keys, and blocks that are none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from bough.attention.batch import AttentionBatch, ChunkPlaces
from bough.attention.triton_backend import chunk_blocks
from bough.core.plan import BatchPlan, IntArray, Limits
from bough.executor.layout import LongArray, StepLayout, sampled_tokens
from bough.executor.staging import Staging

LONG_FIELDS = 2  # token ids, positions; and the slots of each group
ALIGNMENT = 4  # integers: 16 bytes, as kernels assume of every array
FROM_DEVICE = -1  # in place of a token id: the last one that the row sampled


@dataclass(frozen=True, slots=True)
class Room:
    """How many of each a graph of so many tokens has room for."""

    tokens: int
    rows: int
    blocks: int

    def fields(self) -> dict[str, int]:
        """The short integers, by name."""
        rows = self.rows
        return {
            "rows": rows,
            "lengths": rows,
            "context_lens": rows,
            "query_starts": rows + 1,
            "logits_indices": rows,
            "blocks": 2 * self.blocks,
            "ends": 2 * rows,
        }

    def places(self) -> dict[str, slice]:
        """Where they stand in the packed array."""
        places, start = {}, 0
        for name, size in self.fields().items():
            places[name] = slice(start, start + size)
            start += -(-size // ALIGNMENT) * ALIGNMENT
        return places


@dataclass(frozen=True, slots=True)
class CapturedInputs:
    """What a graph works on."""

    token_ids: torch.Tensor
    batch: AttentionBatch
    logits_indices: torch.Tensor  # [rows] tokens whose hidden states are asked for


class MixedInputs:
    """Owns the buffers. `page_tables` and `last_tokens` belong to the rows, whose last one is scratch."""

    def __init__(
        self,
        limits: Limits,
        block_queries: int,
        page_tables: tuple[torch.Tensor, ...],
        last_tokens: torch.Tensor,
        staging: Staging,
    ) -> None:
        self._limits = limits
        self._block_queries = block_queries
        self._page_tables = page_tables
        self._long_fields = LONG_FIELDS + len(page_tables)
        self._last_tokens = last_tokens
        self._staging = staging
        most = self.room(self.largest)
        self._longs = torch.zeros(self._long_fields * most.tokens, dtype=torch.int64, device=last_tokens.device)
        ints = sum(size + ALIGNMENT for size in most.fields().values())
        self._ints = torch.zeros(ints, dtype=torch.int32, device=last_tokens.device)

    @property
    def largest(self) -> int:
        """Tokens of the largest step there can be."""
        return self._limits.chunk_tokens + self._limits.rows

    def room(self, tokens: int) -> Room:
        """Every row may end in a block of its own."""
        rows = min(self._limits.rows, tokens)
        return Room(tokens, rows, -(-tokens // self._block_queries) + rows)

    def send(self, plan: BatchPlan, layout: StepLayout, size: int) -> None:
        """Copies a step to the buffers of the graph of this size."""
        room, decodes = self.room(size), len(layout.from_device)
        longs = np.zeros((self._long_fields, size), dtype=np.int64)
        for field, values in zip(longs, (layout.token_ids, layout.rotary, *layout.slots), strict=True):
            field[: len(values)] = values
        longs[0, :decodes] = FROM_DEVICE
        ints, places = self._empty(room)

        def put(name: str, values: IntArray | LongArray) -> None:
            ints[places[name]][: values.size] = values.ravel()

        put("rows", layout.rows)
        put("lengths", layout.lengths[:decodes])
        put("context_lens", layout.context_lens)
        put("query_starts", layout.query_starts)
        put("logits_indices", sampled_tokens(plan, layout.query_starts))
        blocks, ends = chunk_blocks(layout.query_lens, layout.context_lens, decodes, self._block_queries)
        put("blocks", blocks)
        put("ends", ends)
        self._copy(longs, ints)

    def pad(self, size: int) -> None:
        """Leaves nothing but padding, so that a step can be run without effect."""
        self._copy(np.zeros((self._long_fields, size), dtype=np.int64), self._empty(self.room(size))[0])

    def take(self, size: int) -> CapturedInputs:
        """The step in the buffers; everything done with it can be captured in a graph."""
        room = self.room(size)
        ids, positions, *slots = self._longs[: self._long_fields * size].view(-1, size)
        views = {name: self._ints[place] for name, place in room.places().items()}
        first = ids[: room.rows]  # decodes stand first, one token each, so their places are those of their rows
        sampled = self._last_tokens.index_select(0, views["rows"])
        first.copy_(torch.where(first == FROM_DEVICE, sampled, first))
        none = np.zeros(0, dtype=np.int32)
        batch = AttentionBatch(
            rows=views["rows"],
            lengths=views["lengths"],
            decodes=room.rows,
            query_lens=none,  # unknown to the host when the graph is replayed
            query_starts=none,
            context_lens=none,
            page_tables=self._page_tables,
            slots=tuple(slots),
            positions=positions,
            page_size=self._limits.page_size,
            starts=views["query_starts"],
            chunks=ChunkPlaces(
                query_starts=views["query_starts"],
                context_lens=views["context_lens"],
                blocks=views["blocks"].view(-1, 2),
                ends=views["ends"].view(-1, 2),
            ),
        )
        return CapturedInputs(ids, batch, views["logits_indices"])

    def _empty(self, room: Room) -> tuple[IntArray, dict[str, slice]]:
        """The packed short integers of a step of padding, and where each field stands."""
        places = room.places()
        ints = np.zeros(places["ends"].stop, dtype=np.int32)
        ints[places["rows"]] = self._limits.rows
        ints[places["blocks"].start :] = -1  # and those of the ends behind them
        return ints, places

    def _copy(self, longs: LongArray, ints: IntArray) -> None:
        self._staging.copy_into(self._longs[: longs.size], longs)
        self._staging.copy_into(self._ints[: len(ints)], ints)
