"""How the keys of a decode step are shared out among programs, decided on the device.

Programs must be of similar size, and under CUDA graphs only the device knows the lengths. So one small kernel, run once
a step, cuts the rows into *items* (a row and a range of its keys), and all layers with the same window attend by them.
`DecodeWork` owns the items, the results of rows that were cut, and the counters by which the items of a row find out
which of them is the last. It belongs to one window and one stream.
"""

import torch
import triton
import triton.language as tl

KEY_STEP = 128  # chunks are a multiple of it: only the end of a row leaves a program with less than a block of keys;
# and in shorter ones combining costs more than the further programs save
PROGRAMS = 8 * 132  # enough to fill a large GPU when rows are few: about eight programs for each multiprocessor
ITEM_FIELDS = 4  # place in the batch, first key, end of keys, how many items the row has
PLAN_TILE = 1024


class DecodeWork:
    """Items of a step of at most `max_batch` rows, and room for their partial results."""

    cuts = True  # whether rows may have several items

    def __init__(
        self,
        max_batch: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        *,
        window: int | None = None,
        chunked: bool = False,  # the window is one of those that stand side by side
        programs: int = PROGRAMS,
        key_step: int = KEY_STEP,
    ) -> None:
        self.max_batch = max_batch
        self.key_step = key_step
        self.window, self.chunked = window, chunked
        self._programs = -(-programs // kv_heads)
        room = self.max_items(max_batch)
        self.items = torch.empty((room, ITEM_FIELDS), dtype=torch.int32, device=device)
        self.first_item = torch.empty(max_batch + 1, dtype=torch.int32, device=device)  # the last one is the count
        self.partial = torch.empty((room, heads, head_dim), dtype=torch.float32, device=device)
        self.log_sums = torch.empty((room, heads), dtype=torch.float32, device=device)
        self.arrivals = torch.zeros((max_batch, kv_heads), dtype=torch.int32, device=device)  # zero between launches

    def target_items(self, batch: int) -> int:
        """How many chunks the keys of all rows should make, were the rows one. Many rows fill the device by themselves:
        of them only those that are much longer than the others are cut."""
        return max(self._programs, batch // 2)

    def max_items(self, batch: int) -> int:
        """A bound that always holds, hence the grid.

        A row of n keys makes ceil(n / chunk) <= 1 + n / chunk items, the batch at most batch + total / chunk. The
        chunk is at least total / target_items.
        """
        return batch + self.target_items(batch)


class WholeRows(DecodeWork):
    """Rows of these lengths [batch] (int32), each of which is one item: for so many rows that they fill the device."""

    cuts, window = False, None

    def __init__(self, lengths: torch.Tensor) -> None:
        self.max_batch = len(lengths)
        self.first_item = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
        first, one = torch.zeros_like(lengths), torch.ones_like(lengths)
        self.items = torch.stack((self.first_item[:-1], first, lengths, one), dim=1)
        self.partial = self.log_sums = self.arrivals = lengths.new_empty(0)

    def max_items(self, batch: int) -> int:
        return batch


def plan_decode(lengths: torch.Tensor, work: DecodeWork, own_first: torch.Tensor | None = None) -> None:
    """Cuts rows of these lengths [batch] (int32, own query included; 0: a place without a row) into the items of
    `work`; of each row the keys from `own_first` on, where others are read together with its neighbours'."""
    batch = lengths.shape[0]
    if batch > work.max_batch:
        raise ValueError(f"a batch of {batch} rows does not fit in work made for {work.max_batch}")
    block_rows = max(16, triton.next_power_of_2(batch))
    # Without overlap: attention reads the items before its turn (`projected_decode`).
    _plan[(1,)](
        lengths, own_first, work.items, work.first_item, batch, work.target_items(batch),
        WINDOW=work.window or 0, CHUNKED=work.chunked, STEP=work.key_step, FIELDS=ITEM_FIELDS, BLOCK_ROWS=block_rows,
        BLOCK_SPLITS=max(1, PLAN_TILE // block_rows),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def oldest_seen(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """The first key that the query at this position sees through its window."""
    return position // WINDOW * WINDOW if CHUNKED else tl.maximum(position - (WINDOW - 1), 0)


@triton.jit(do_not_specialize=["batch", "target_items"])
def _plan(
    lengths,  # [batch]
    own_first,  # [batch] or None
    items,  # [max_items, FIELDS]
    first_item,  # [batch + 1]
    batch: int, target_items: int,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, STEP: tl.constexpr, FIELDS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, BLOCK_ROWS)
    real = row < batch
    length = tl.load(lengths + row, mask=real, other=0)
    visible = length
    if own_first is not None:
        visible = length - tl.load(own_first + row, mask=real, other=0)
    if WINDOW:
        visible = length - oldest_seen(tl.maximum(length - 1, 0), WINDOW, CHUNKED)
    share = tl.cdiv(tl.sum(visible.to(tl.int64)), target_items)
    chunk = (tl.maximum(tl.cdiv(share, STEP), 1) * STEP).to(tl.int32)
    splits = tl.cdiv(visible, chunk)
    size = tl.cdiv(tl.cdiv(visible, tl.maximum(splits, 1)), STEP) * STEP  # equal parts: a row is as late as its longest
    count = tl.sum(splits)
    place = tl.cumsum(splits, 0) - splits
    tl.store(first_item + row, place, mask=real)
    tl.store(first_item + batch, count)

    most = tl.max(splits)
    for start in range(0, most, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        item = place[:, None] + split[None, :]
        valid = split[None, :] < splits[:, None]
        first = (length - visible)[:, None] + split[None, :] * size[:, None]
        last = tl.minimum(first + size[:, None], length[:, None])
        field = items + item * FIELDS
        tl.store(field, row[:, None] + split[None, :] * 0, mask=valid)
        tl.store(field + 1, first, mask=valid)
        tl.store(field + 2, last, mask=valid)
        tl.store(field + 3, splits[:, None] + split[None, :] * 0, mask=valid)
