"""Which slots each row of a step reads, worked out once a step and not once a layer.

Pure functions from a batch to `Reads`, and the masks that go with them. Padding always repeats a slot that its row has
written: the pool's memory is never cleared, and a stray NaN survives any mask.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bough.attention.batch import AttentionBatch

ToDevice = Callable[[npt.NDArray[Any]], torch.Tensor]  # takes small host arrays to where the batch is

MAX_GROUP_TOKENS = 32768  # bounds the memory that one gather of a group takes
MASK_ALIGNMENT = 16  # numbers
FREE_PADDING = 64  # rows whose lengths differ by less share a group at any length: an extra call costs more


@dataclass(frozen=True, slots=True)
class DecodeRead:
    """Rows with one query each. Every row reads equally many slots; `mask` hides the padding."""

    tokens: torch.Tensor  # [rows] int64, the rows' places in the token dimension
    rows: int
    index: slice | torch.Tensor  # [rows * keys] slots; a slice only for a single row
    mask: torch.Tensor | None  # [rows, 1, 1, keys], added to the scores

    @property
    def keys(self) -> int:
        """That each row reads."""
        index = self.index
        return index.stop - index.start if isinstance(index, slice) else len(index) // self.rows


@dataclass(frozen=True, slots=True)
class PrefillRead:
    """One row with several queries; its last query sees the last slot."""

    first_token: int
    last_token: int
    index: slice | torch.Tensor  # [keys] slots


@dataclass(frozen=True, slots=True)
class Reads:
    """All rows of a step."""

    decodes: tuple[DecodeRead, ...]
    prefills: tuple[PrefillRead, ...]
    single_group: DecodeRead | None  # the whole step, where it is one group in token order


class TextsTogether(NamedTuple):
    """Rows of a step whose texts have similar lengths."""

    places: torch.Tensor  # [rows, width] int64, of tokens in the step; behind a text's end its last token again
    padding: torch.Tensor  # [rows, width] whether it is that
    kept: torch.Tensor  # [tokens] int64, which of `places` are tokens
    tokens: torch.Tensor  # [tokens] int64, those


def texts_together(batch: AttentionBatch, to_device: ToDevice) -> Iterator[TextsTogether]:
    """All texts of a step, in groups in which none is twice as long as another."""
    sizes = np.frexp(batch.query_lens - 0.5)[1]
    for size in np.unique(sizes):
        lengths, starts = batch.query_lens[sizes == size], batch.query_starts[:-1][sizes == size]
        at = np.arange(lengths.max())
        places = (starts[:, None] + np.minimum(at, lengths[:, None] - 1)).astype(np.int64)
        padding = at >= lengths[:, None]
        kept = np.flatnonzero(~padding)
        yield TextsTogether(*map(to_device, (places, padding, kept, places.ravel()[kept])))


class CausalMasks:
    """Additive masks in which the last query sees the last key: every block's mask is a corner of one tensor."""

    def __init__(self, max_queries: int) -> None:
        self._max_queries = max_queries
        self._masks: dict[tuple[int | None, torch.dtype, torch.device], torch.Tensor] = {}

    def cut(self, queries: int, keys: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """[queries, keys] in the type and on the device of `like`."""
        key = (window, like.dtype, like.device)
        mask = self._masks.get(key)
        if mask is None or mask.shape[1] < keys:
            width = max(self._max_queries, 1 << (keys - 1).bit_length())
            mask = self._masks[key] = self._build(width, window, like)
        corner = mask[self._max_queries - queries :, mask.shape[1] - keys :]
        return corner if like.device.type == "cpu" else _aligned(corner)

    def _build(self, width: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        query = torch.arange(width - self._max_queries, width, device=like.device)[:, None]
        key = torch.arange(width, device=like.device)[None, :]
        hidden = key > query
        if window is not None:
            hidden |= query - key >= window
        zeros = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        return zeros.masked_fill_(hidden, float("-inf"))


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """A copy whose lines begin where GPU kernels can load many numbers at once; a corner's do not, and they check."""
    rows, width = mask.shape
    copy = mask.new_empty((rows, -(-width // MASK_ALIGNMENT) * MASK_ALIGNMENT))[:, :width]
    return copy.copy_(mask)


def plan_reads(
    batch: AttentionBatch,
    group: int,
    window: int | None,
    dtype: torch.dtype,
    to_device: ToDevice,
    chunked: bool = False,
) -> Reads:
    """The reads of layers of this KV group with this window; of chunked ones rows begin with a whole window."""
    table = batch.page_tables[group]
    ends = (batch.context_lens + batch.query_lens).astype(np.int64)
    begins = np.zeros_like(ends)
    if window is not None:
        first = batch.context_lens.astype(np.int64)
        begins = first // window * window if chunked else np.maximum(0, first + 1 - window)  # what that query sees
    single = np.flatnonzero(batch.query_lens == 1)
    decodes = tuple(
        _decode_read(batch, table, members, begins, ends, dtype, to_device)
        for members in group_by_length(single, (ends - begins)[single])
    )
    prefills = tuple(
        PrefillRead(
            int(batch.query_starts[i]), int(batch.query_starts[i + 1]), _row_slots(batch, table, i, begins[i], ends[i])
        )
        for i in np.flatnonzero(batch.query_lens > 1).tolist()
    )
    whole = len(decodes) == 1 and not prefills
    return Reads(decodes, prefills, decodes[0] if whole else None)


def group_by_length(members: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Splits rows into groups whose padding to the longest stays small; members of a group keep their order."""
    groups: list[npt.NDArray[np.int64]] = []
    order = np.argsort(-lengths, kind="stable")
    start = 0
    for i, place in enumerate(order):
        longest = int(lengths[order[start]])
        padding = longest - int(lengths[place])
        if padding > max(FREE_PADDING, longest // 4) or (i - start + 1) * longest > max(MAX_GROUP_TOKENS, longest):
            groups.append(np.sort(members[order[start:i]]))
            start = i
    if len(order):
        groups.append(np.sort(members[order[start:]]))
    return groups


def _decode_read(
    batch: AttentionBatch,
    table: torch.Tensor,
    members: npt.NDArray[np.int64],
    begins: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    dtype: torch.dtype,
    to_device: ToDevice,
) -> DecodeRead:
    device = table.device
    tokens = to_device(batch.query_starts[members].astype(np.int64))
    if len(members) == 1:
        row = int(members[0])
        return DecodeRead(tokens, 1, _row_slots(batch, table, row, begins[row], ends[row]), None)
    begin, end = to_device(np.stack((begins[members], ends[members])))[:, :, None]
    lengths = ends[members] - begins[members]
    places = begin + torch.arange(int(lengths.max()), device=device)
    mask = None
    if int(lengths.min()) != int(lengths.max()):
        mask = torch.zeros(places.shape, dtype=dtype, device=device).masked_fill_(places >= end, float("-inf"))
        mask = mask[:, None, None, :]
    chosen = batch.rows[to_device(members)]
    index = _slots(table, batch.page_size, chosen, torch.minimum(places, end - 1))
    return DecodeRead(tokens, len(members), index.flatten(), mask)


def _row_slots(
    batch: AttentionBatch, table: torch.Tensor, row: int, begin: np.int64, end: np.int64
) -> slice | torch.Tensor:
    """The slots of one row's tokens begin..end."""
    places = torch.arange(int(begin), int(end), device=table.device)[None, :]
    index = _slots(table, batch.page_size, batch.rows[row : row + 1], places)[0]
    if index.device.type != "cpu":  # asking would wait for the device
        return index
    first = int(index[0])
    adjoin = int(index[-1]) - first == len(index) - 1 and bool((index.diff() == 1).all())
    return slice(first, first + len(index)) if adjoin else index


def _slots(table: torch.Tensor, page_size: int, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Slots of the tokens at `places` [rows, n] of the rows' sequences."""
    return table[rows[:, None], places // page_size].long() * page_size + places % page_size
