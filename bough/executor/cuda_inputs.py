"""What a GPU knows of each row, and the persistent buffers through which a step's inputs reach it.

Stream discipline, for everything in the CUDA executor: there is one stream, the current one. Copies to the device,
kernels, graph replays and copies back are queued on it in the order of the plans, so each step sees what the one before
left, and nothing is ever synchronised on the way. The host waits for one thing only: the event behind a step's results.

A graph's kernels read fixed addresses, so the arrays of a step with prompts are packed on the host as that size's graph
expects them and copied in one go each, long and short integers. What a step does not fill is padding: tokens of page 0
that no row owns, rows without keys, and blocks that are none.
"""

from dataclasses import dataclass

import numpy as np
import torch

from bough.attention.batch import AttentionBatch, ChunkPlaces, decodes_of
from bough.attention.context import MediaRows
from bough.attention.triton_backend import chunk_blocks
from bough.core.plan import BatchPlan, IntArray, Limits
from bough.executor.layout import Growth, LongArray, RowMirror, StepLayout, TableWrites, sampled_tokens
from bough.executor.staging import Staging
from bough.kernels.decode_attention.shared import SharedWork
from bough.kernels.drafted_decode.triton import decode_inputs_

FIELDS = 2  # of a decode step: rows, lengths; and the new pages of each group


class CudaInputs:
    """Owns the rows' state on the device and the host's mirror of it. Row number `limits.rows` is scratch: padding."""

    def __init__(
        self, limits: Limits, device: torch.device, staging: Staging, shared: SharedWork | None = None
    ) -> None:
        self._limits = limits
        self._staging = staging
        self._shared = shared
        self.mirror = RowMirror(limits)
        self.state_table: IntArray = self.mirror.pages[-1]  # where the model has states
        rows, groups = limits.rows, len(limits.pages)
        self.all_page_tables = torch.zeros(self.mirror.pages.shape, dtype=torch.int32, device=device)
        self.page_tables = tuple(self.all_page_tables)
        self.last_tokens = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        self._decode = torch.zeros((FIELDS + groups, rows), dtype=torch.int32, device=device)
        self._flat_decode = self._decode.view(-1)
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.zeros((groups, rows), dtype=torch.int64, device=device)
        # What rows add to the places by which their tokens rotate, of models that read images.
        images = limits.media is not None and not limits.media.width  # prompts of vectors rotate like text
        self._deltas = torch.zeros(rows + 1, dtype=torch.int64, device=device) if images else None

    def apply(self, plan: BatchPlan) -> Growth:
        """Brings the mirror up to date, and the device's table with what setups and edits changed."""
        growth = self.mirror.grow(plan)
        self.write_table(growth.rewritten)
        if self._deltas is not None and plan.setups:
            rows = np.array([setup.row for setup in plan.setups], dtype=np.int64)
            self._deltas.index_copy_(0, *map(self._staging.to_device, (rows, self.mirror.deltas[rows])))
        return growth

    def lay_out(self, plan: BatchPlan, growth: Growth) -> StepLayout:
        """A step with prompts, whose pages are added to the device's table; those of decodes alone go with
        `send_decode`."""
        self.write_table(growth.appended)
        return self.mirror.lay_out(plan, growth)

    def write_table(self, writes: TableWrites) -> None:
        """Changes the device's page tables."""
        if len(writes.places):
            places = self._staging.to_device(writes.places)
            self.all_page_tables.view(-1).index_copy_(0, places, self._staging.to_device(writes.pages))

    # A step of decodes alone ------------------------------------------------------------------------------------------

    def send_decode(self, plan: BatchPlan, growth: Growth, size: int) -> None:
        """Copies a decode step's rows, lengths and new pages to the persistent buffers, padded to `size` with the
        scratch row."""
        n = len(plan.rows)
        packed = np.zeros(self._decode.shape, dtype=np.int32)
        packed[0, :n] = plan.rows
        packed[1, :n] = growth.lengths
        for field, counts, pages in zip(packed[FIELDS:], plan.new_page_counts, plan.new_pages, strict=True):
            field[:n][counts > 0] = pages
        if n < size:
            packed[0, n:size] = self._limits.rows
            packed[1, n:size] = 1
        self._staging.copy_into(self._flat_decode, packed)

    def share(self, common: IntArray | None) -> bool:
        """Whether decodes with so much in common read it together; the plan for that is sent where it is another than
        the last step's."""
        if self._shared is None:
            return False
        packed, changed = self._shared.plan(common)
        if packed is not None and changed:
            self._staging.copy_into(self._shared.buffer, packed)
        return packed is not None

    def pad_decode(self) -> None:
        """Leaves nothing but padding in the persistent buffers, so that a step can be run on them without effect."""
        self._decode.zero_()
        self._decode[0].fill_(self._limits.rows)
        self._decode[1].fill_(1)
        if self._shared is not None:
            self._shared.clear()

    def decode_batch(
        self, size: int, few_keys: bool, context_lens: IntArray | None = None, *, shared: bool = False
    ) -> tuple[torch.Tensor, AttentionBatch]:
        """The step in the persistent buffers; everything it does can be captured in a graph, for which the host knows
        no context lengths, only whether they are few keys in all."""
        rows, lengths, new_pages = self._decode[0, :size], self._decode[1, :size], self._decode[FIELDS:, :size]
        ids, positions, slots = self._token_ids[:size], self._positions[:size], self._slots[:, :size]
        known, page_size = (self.all_page_tables, self.last_tokens), self._limits.page_size
        decode_inputs_(rows, lengths, new_pages, *known, ids, positions, slots, page_size)
        self.shift_(positions, rows)
        parts = rows, lengths, positions, tuple(slots), self.page_tables, page_size
        return ids, decodes_of(*parts, context_lens, few_keys=few_keys, shared=self._shared if shared else None)

    def shift_(self, positions: torch.Tensor, rows: torch.Tensor) -> None:
        """Turns places in sequences into those by which tokens of these rows rotate."""
        if self._deltas is not None:
            positions.add_(self._deltas.index_select(0, rows))

    def decode_rows(self, count: int) -> torch.Tensor:
        return self._decode[0, :count]

    # Any step ---------------------------------------------------------------------------------------------------------

    def mixed_batch(self, layout: StepLayout, both_ways: IntArray | None = None) -> tuple[torch.Tensor, AttentionBatch]:
        """A step with prompts or drafts in it, in fresh tensors."""
        to_device = self._staging.to_device
        batch = layout.batch(to_device, self.page_tables, self._limits.page_size, both_ways)
        ids, decodes = to_device(layout.token_ids), len(layout.from_device)
        if decodes:  # they stand first
            ids.index_copy_(0, to_device(layout.from_device.astype(np.int64)), self.last_tokens[batch.rows[:decodes]])
        return ids, batch

    def advance(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """The rows' next decode begins with these tokens."""
        self.last_tokens.index_copy_(0, rows, tokens)


LONG_FIELDS = 1  # token ids; and the positions on each axis, and the slots of each group
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


class MixedInputs:
    """Owns the buffers. `page_tables` and `last_tokens` belong to the rows, whose last one is scratch. `axes` is how
    many positions each token has, `media` has room for the tokens of the largest graph; None: no graph takes any."""

    def __init__(
        self,
        limits: Limits,
        block_queries: int,
        page_tables: tuple[torch.Tensor, ...],
        last_tokens: torch.Tensor,
        staging: Staging,
        axes: int = 1,
        media: MediaRows | None = None,
    ) -> None:
        self._limits = limits
        self._block_queries = block_queries
        self._page_tables = page_tables
        self._axes, self.media = axes, media
        self._long_fields = LONG_FIELDS + axes + len(page_tables)
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

    def send(self, plan: BatchPlan, layout: StepLayout, size: int, media: MediaRows | None = None) -> None:
        """Copies a step to the buffers of the graph of this size."""
        room, decodes = self.room(size), len(layout.from_device)
        longs = np.zeros((self._long_fields, size), dtype=np.int64)
        rotary = np.broadcast_to(layout.rotary, (self._axes, len(layout.token_ids)))
        longs[:, : len(layout.token_ids)] = np.vstack((layout.token_ids, rotary, layout.slots))
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
        if media is not None and self.media is not None:
            self.media.here[: len(media.here)].copy_(media.here)
            self.media.rows[:, : len(media.here)].copy_(media.rows)

    def pad(self, size: int) -> None:
        """Leaves nothing but padding, so that a step can be run without effect."""
        self._copy(np.zeros((self._long_fields, size), dtype=np.int64), self._empty(self.room(size))[0])

    def take(self, size: int) -> tuple[torch.Tensor, AttentionBatch, torch.Tensor, MediaRows | None]:
        """The step in the buffers, with the tokens whose hidden states are asked for; everything done with it can be
        captured in a graph."""
        room = self.room(size)
        longs = self._longs[: self._long_fields * size].view(-1, size)
        ids, positions, slots = longs[0], longs[1 : 1 + self._axes], longs[1 + self._axes :]
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
            positions=positions if self._axes > 1 else positions[0],
            page_size=self._limits.page_size,
            starts=views["query_starts"],
            chunks=ChunkPlaces(
                query_starts=views["query_starts"],
                context_lens=views["context_lens"],
                blocks=views["blocks"].view(-1, 2),
                ends=views["ends"].view(-1, 2),
            ),
        )
        media = self.media and MediaRows(self.media.here[:size], self.media.rows[:, :size])
        return ids, batch, views["logits_indices"], media

    def _empty(self, room: Room) -> tuple[IntArray, dict[str, slice]]:
        """The packed short integers of a step of padding, and where each field stands."""
        places = room.places()
        ints = np.zeros(places["ends"].stop, dtype=np.int32)
        ints[places["rows"]] = self._limits.rows
        ints[places["blocks"].start :] = -1  # and those of the ends behind them
        return ints, places

    def _copy(self, longs: LongArray, ints: IntArray) -> None:
        if self.media is not None:
            self.media.here.zero_()
        self._staging.copy_into(self._longs[: longs.size], longs)
        self._staging.copy_into(self._ints[: len(ints)], ints)
