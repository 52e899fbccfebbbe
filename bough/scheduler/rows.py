"""The host's twin of the executor's rows: structure of arrays, so that a step over many rows is a few numpy calls.

Only its methods write to the arrays. `length` counts tokens whose keys and values a launched step computes, `known`
those whose value the host has seen. A decode counts with all its drafts until its result tells how many held.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from bough.core.errors import ResourceError
from bough.core.model_config import FULL_ATTENTION, KVGroup
from bough.core.plan import IntArray, positions_in_runs
from bough.scheduler.request import Request

MAX_TABLE_BYTES = 2**36  # of address space; memory is taken only as rows are used

RowIndex = npt.NDArray[np.intp]  # rows to index the table by: numpy would first convert any other kind, at every use


class Phase:
    """Where a row stands. Plain integers: numpy takes far longer to read an enum than to compare a table with it."""

    FREE: Final = 0
    PREFILL: Final = 1  # more of the prompt is to be computed
    DECODE: Final = 2  # every further step samples a token
    DRAINING: Final = 3  # its last step is in flight


class RowTable:
    """Arrays indexed by row. The large ones are committed by the operating system only as they are touched."""

    def __init__(
        self,
        rows: int,
        context_length: int,
        page_size: int,
        groups: Sequence[KVGroup] = (FULL_ATTENTION,),
        draft_levels: int = 0,
    ) -> None:
        self.page_size = page_size
        widths = [1 if group.kind == "state" else -(-context_length // page_size) for group in groups]
        self.tokens, self.pages, *group_pages = _large_tables(rows, context_length, widths)
        # Of each further KV group: a table like `pages`, and which of a row's pages is the first that it holds.
        self.group_pages = tuple(group_pages)
        self.group_first = tuple(np.zeros(rows, dtype=np.int32) for _ in group_pages)
        self._is_state = tuple(group.kind == "state" for group in groups[1:])
        self.page_count = np.zeros(rows, dtype=np.int32)
        self.tree_pages = np.zeros(rows, dtype=np.int32)  # how many of its first pages the tree owns
        self.length = np.zeros(rows, dtype=np.int32)
        self.known = np.zeros(rows, dtype=np.int32)
        self.prompt_len = np.zeros(rows, dtype=np.int32)
        self.sampled = np.zeros(rows, dtype=np.int32)  # output tokens launched: the most that those in flight can give
        self.max_new = np.zeros(rows, dtype=np.int32)
        self.phase = np.zeros(rows, dtype=np.int8)
        self.serial = np.zeros(rows, dtype=np.int64)  # changes with the owner: tells a late result from a fresh one
        self.handle = np.zeros(rows, dtype=np.int64)
        self.heeds_eos = np.zeros(rows, dtype=np.bool_)
        self.has_stop_ids = np.zeros(rows, dtype=np.bool_)
        self.wants_logprobs = np.zeros(rows, dtype=np.bool_)
        self.streams = np.zeros(rows, dtype=np.bool_)
        self.constrained = np.zeros(rows, dtype=np.bool_)
        self.held = np.zeros(rows, dtype=np.bool_)  # nothing is planned for it: its mask is being worked out
        self.requests: list[Request | None] = [None] * rows
        self._free = list(range(rows - 1, -1, -1))
        self._serials = 0
        self._most_gain = 1 + draft_levels if draft_levels else context_length  # tokens of a row in a step

    @property
    def free_rows(self) -> int:
        return len(self._free)

    @property
    def running(self) -> int:
        return len(self.requests) - len(self._free)

    def assign(self, request: Request) -> int:
        """Gives the request a row and copies its tokens there; `begin` sets its pages."""
        row = self._free.pop()
        total = len(request.tokens)
        self.drop_in_flight(row)
        self.handle[row] = request.handle
        self.tokens[row, :total] = request.tokens
        self.known[row] = total
        self.prompt_len[row] = request.prompt_len
        self.streams[row] = request.stream
        self.sampled[row] = request.generated
        self.max_new[row] = request.max_new
        self.page_count[row] = self.tree_pages[row] = self.length[row] = 0
        self.phase[row] = Phase.PREFILL
        self.constrained[row] = request.constraint is not None
        self.held[row] = False
        # Under a grammar the end comes only where it must: its mask heeds `ignore_eos`.
        self.heeds_eos[row] = not request.sampling.ignore_eos or request.sampling.constrained
        self.has_stop_ids[row] = bool(request.sampling.stop_token_ids)
        self.wants_logprobs[row] = request.logprobs is not None
        self.requests[row] = request
        request.take_row(row)
        return row

    def drop_in_flight(self, row: int) -> None:
        """Changes the row's serial, so that results of steps in flight for it are dropped."""
        self._serials += 1
        self.serial[row] = self._serials

    def free(self, request: Request) -> None:
        """Frees the row; the request keeps its tokens, prompt and output."""
        row = request.row
        request.leave_row(self.tokens[row, : self.known[row]].copy())
        self.held[row] = False
        self.requests[row] = None
        self.phase[row] = Phase.FREE
        self.serial[row] = 0
        self._free.append(row)

    # -- pages ---------------------------------------------------------------------------------------------------------

    def begin(self, row: int, prefix: IntArray, length: int, group_pages: Sequence[IntArray]) -> None:
        """The row begins with a cached prefix of so many tokens, whose pages the tree owns. Of further groups it holds
        the pages that are not 0."""
        self.pages[row, : len(prefix)] = prefix
        self.page_count[row] = self.tree_pages[row] = len(prefix)
        self.length[row] = length
        for table, first, pages in zip(self.group_pages, self.group_first, group_pages, strict=True):
            table[row, : len(pages)] = pages
            first[row] = np.count_nonzero(pages == 0)

    def grow(
        self, rows: RowIndex, lengths: IntArray, counts: IntArray, pages: IntArray, group_pages: Sequence[IntArray]
    ) -> None:
        """These rows have been given `counts` pages each behind their own, which stand in row order; a launched step
        computes their tokens up to `lengths`."""
        if len(pages):
            held = self.page_count[rows]
            receivers, places = rows, held
            if len(pages) != len(rows) or not counts.all():  # else one each: nothing to spread
                receivers, places = rows.repeat(counts), held.repeat(counts) + positions_in_runs(counts)
            for table, new in zip((self.pages, *self.group_pages), (pages, *group_pages), strict=True):
                if len(new):
                    table[receivers, places] = new
            self.page_count[rows] = held + counts
        self.length[rows] = lengths

    def extend(self, row: int, length: int, pages: IntArray, group_pages: Sequence[IntArray]) -> None:
        """`grow` of a prompt, whose next chunk has these pages."""
        held = int(self.page_count[row])
        for table, new in zip((self.pages, *self.group_pages), (pages, *group_pages), strict=True):
            table[row, held : held + len(new)] = new
        self.page_count[row], self.length[row] = held + len(pages), length

    def pass_pages(self, group: int, rows: RowIndex, first: IntArray) -> IntArray:
        """These rows hold pages of a further group only from `first` on; returns those that they held before."""
        held = self.group_first[group][rows]
        counts = first - held
        self.group_first[group][rows] = first
        passed: IntArray = self.group_pages[group][rows.repeat(counts), held.repeat(counts) + positions_in_runs(counts)]
        return passed

    def held_pages(self, group: int, row: int) -> IntArray:
        """The pages of a further group that the row holds; a view."""
        table, first = self.group_pages[group], int(self.group_first[group][row])
        held: IntArray = table[row, first : 1 if self._is_state[group] else int(self.page_count[row])]
        return held

    def move_to_tree(self, row: int, pages: IntArray) -> None:
        """The tree owns the row's first pages, which are these."""
        self.pages[row, : len(pages)] = pages
        self.tree_pages[row] = len(pages)

    def rewind(self, row: int, pages: int, length: int) -> None:
        """The row keeps its first `pages` and goes on as a prompt behind its first `length` tokens. Results of steps in
        flight for it are dropped."""
        self.tree_pages[row] = min(int(self.tree_pages[row]), pages)
        self.page_count[row] = pages
        self.length[row] = length
        self.sampled[row] = self.known[row] - self.prompt_len[row]
        self.phase[row] = Phase.PREFILL
        self.drop_in_flight(row)

    # -- tokens --------------------------------------------------------------------------------------------------------

    def end_prompt(self, row: int) -> None:
        """The last chunk of the prompt is launched, which samples if the request may have a token."""
        self.sampled[row] += self.max_new[row] > self.sampled[row]
        self.phase[row] = Phase.DECODE if self.sampled[row] < self.max_new[row] else Phase.DRAINING

    def lay(self, row: int, first: int, tokens: Sequence[int]) -> None:
        """Writes tokens from place `first` on; they are the row's last."""
        self.tokens[row, first : first + len(tokens)] = tokens
        self.known[row] = first + len(tokens)

    def cut(self, row: int, *, known: int | None = None, length: int | None = None) -> None:
        """The row has no more than so many tokens that are known, or computed."""
        if known is not None:
            self.known[row] = min(known, int(self.known[row]))
        if length is not None:
            self.length[row] = min(length, int(self.length[row]))

    def hold(self, row: int, held: bool) -> None:
        """Whether planning leaves the row out."""
        self.held[row] = held

    def gains(self, widths: IntArray) -> IntArray:
        """The most tokens that steps of so many for each row give them: of a tree, those of a path."""
        return np.minimum(widths, self._most_gain)

    def count_samples(self, rows: RowIndex, widths: IntArray) -> None:
        """These rows sample up to so many tokens in a launched step. Those that may be complete with them wait for its
        result."""
        gains = self.gains(widths)
        self.length[rows] -= widths - gains
        sampled = self.sampled[rows] + gains
        self.sampled[rows] = sampled
        self.phase[rows[sampled >= self.max_new[rows]]] = Phase.DRAINING

    def give_back(self, rows: RowIndex, missing: IntArray) -> None:
        """So many tokens that these rows were counted with did not hold."""
        self.length[rows] -= missing
        sampled = self.sampled[rows] - missing
        self.sampled[rows] = sampled
        incomplete = (self.phase[rows] == Phase.DRAINING) & (sampled < self.max_new[rows])
        self.phase[rows[incomplete]] = Phase.DECODE

    def append(self, rows: RowIndex, tokens: IntArray, counts: IntArray) -> None:
        """Lays the first `counts` tokens of each line of `tokens` behind what is known of these rows."""
        known = self.known[rows]
        held = np.arange(tokens.shape[1]) < counts[:, None]
        self.tokens[rows.repeat(counts), known.repeat(counts) + positions_in_runs(counts)] = tokens[held]
        self.known[rows] = known + counts

    def append_one(self, rows: RowIndex, tokens: IntArray) -> None:
        """`append` of one token each, as nearly all steps do it."""
        known = self.known[rows]
        self.tokens[rows, known] = tokens
        self.known[rows] = known + 1

    def request_in(self, row: int) -> Request:
        request = self.requests[row]
        assert request is not None, f"row {row} is free"
        return request

    def decoding(self) -> RowIndex:
        """Rows that decode, those that begin on the same page side by side: they read the same prefix, and a device's
        cache serves it to neighbours."""
        rows: RowIndex = (self.phase == Phase.DECODE).nonzero()[0]
        order: RowIndex = self.pages[rows, 0].argsort(kind="stable")
        return rows[order]

    def prefilling(self) -> list[int]:
        """Rows with more prompt to compute, oldest request first."""
        rows = (self.phase == Phase.PREFILL).nonzero()[0].tolist()
        return sorted((row for row in rows if not self.held[row]), key=lambda row: self.request_in(row).arrival)

    def running_requests(self) -> list[Request]:
        return [r for r in self.requests if r is not None]

    def valid_tokens(self, row: int) -> int:
        """Tokens whose value is known and whose keys and values are computed by a launched step."""
        return int(min(self.length[row], self.known[row]))


def _large_tables(rows: int, context_length: int, widths: Sequence[int]) -> list[IntArray]:
    row_bytes = (context_length + sum(widths)) * np.dtype(np.int32).itemsize
    too_large = ResourceError(
        f"{rows} rows (--max-running-requests) of {context_length} tokens (--context-length) need tables of "
        f"{rows * row_bytes / 2**30:.1f} GiB on the host; set --max-running-requests to "
        f"{max(1, min(rows // 2, MAX_TABLE_BYTES // row_bytes))} or less, or lower --context-length."
    )
    if rows * row_bytes > MAX_TABLE_BYTES:
        raise too_large
    try:
        return [np.zeros((rows, width), dtype=np.int32) for width in (context_length, *widths)]
    except MemoryError:
        raise too_large from None
