"""Rows grow as plans say, whether prompts are among them or not, and a device finds the places of decodes by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.core.plan import BatchPlan, Limits, RowSetup
from bough.core.sampling_params import SamplingParams
from bough.executor.cuda_inputs import CudaInputs
from bough.executor.layout import RowMirror

ROWS, CONTEXT = 5, 24
OFFSET = 500  # from the pages of full attention to those of a second KV group
NONE = np.zeros(0, dtype=np.int32)


class Rows:
    """Makes plans of rows that decode and rows that get so many tokens, and remembers which pages each row has."""

    def __init__(self, page_size: int) -> None:
        self.limits = Limits(ROWS, page_size, (1000, 1000 + OFFSET), CONTEXT, 50, 8, "")
        self.pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self._handed_out = 0

    def plan(self, chunks: dict[int, int], drafts: int = 0, given: int = 0) -> BatchPlan:
        """Decodes have so many drafts, the first of them given."""
        begun = [row for row in self.lengths if row not in chunks and self.lengths[row] + drafts < CONTEXT]
        chunks = {row: count for row, count in chunks.items() if self.lengths.get(row, 0) + count <= CONTEXT}
        fresh = [row for row in chunks if row not in self.lengths]
        lens = [*(1 + drafts for _ in begun), *chunks.values()]
        known = [*(given for _ in begun), *chunks.values()]
        got = [self._grow(row, count) for row, count in zip([*begun, *chunks], lens, strict=True)]
        new_pages = np.array([page for pages in got for page in pages], dtype=np.int32)
        return BatchPlan(
            step=0,
            setups=tuple(RowSetup(r, SamplingParams(), 0, (NONE, NONE), 0, 0, None, 0, None, ()) for r in fresh),
            edits=(),
            rows=np.array([*begun, *chunks], dtype=np.int32),
            query_lens=np.array(lens, dtype=np.int32),
            given=np.array(known, dtype=np.int32),
            tokens=np.arange(1, sum(known) + 1, dtype=np.int32),
            new_pages=(new_pages, new_pages + OFFSET),
            new_page_counts=(np.array([len(pages) for pages in got], dtype=np.int32),) * 2,
            sample=np.ones(len(lens), dtype=np.bool_),
        )

    def slots(self, row: int, count: int) -> list[int]:
        """Where the row's last tokens stand."""
        size, end = self.limits.page_size, self.lengths[row]
        return [self.pages[row][at // size] * size + at % size for at in range(end - count, end)]

    def _grow(self, row: int, count: int) -> list[int]:
        pages, length = self.pages.setdefault(row, []), self.lengths.get(row, 0) + count
        short = -(-length // self.limits.page_size) - len(pages)
        new = [self._handed_out + i + 1 for i in range(short)]
        self._handed_out += short
        pages += new
        self.lengths[row] = length
        return new


STEPS = st.lists(st.dictionaries(st.integers(0, ROWS - 1), st.integers(1, 7), max_size=2), min_size=1, max_size=12)


@settings(deadline=None, derandomize=True)
@given(steps=STEPS, page_size=st.sampled_from([1, 4]), drafts=st.integers(0, 4), given_drafts=st.integers(0, 4))
def test_rows_grow_as_plans_say(steps: list[dict[int, int]], page_size: int, drafts: int, given_drafts: int) -> None:
    rows = Rows(page_size)
    mirror = RowMirror(rows.limits)
    device_table = np.zeros_like(mirror.pages)
    for chunks in steps:
        before, plan = dict(rows.lengths), rows.plan(chunks, drafts, min(drafts, given_drafts))
        if not len(plan.rows):
            continue
        growth = mirror.grow(plan)
        layout = mirror.lay_out(plan, growth)
        device_table.reshape(-1)[growth.appended.places] = growth.appended.pages
        step = list(zip(plan.rows.tolist(), plan.query_lens.tolist(), strict=True))
        assert growth.context_lens.tolist() == [before.get(row, 0) for row, _ in step]
        assert growth.lengths.tolist() == [rows.lengths[row] for row, _ in step]
        slots = [slot for row, count in step for slot in rows.slots(row, count)]
        assert layout.slots.tolist() == [slots, [slot + OFFSET * page_size for slot in slots]]
        assert layout.slots.flags.c_contiguous
        tokens = iter(plan.tokens.tolist())
        for start, (_, count), known in zip(layout.query_starts.tolist(), step, plan.given.tolist(), strict=False):
            first = known < count  # a decode: its first token is on the device
            expected = [*([0] if first else []), *(next(tokens) for _ in range(known))]
            expected += [0] * (count - len(expected))
            assert layout.token_ids[start : start + count].tolist() == expected
            assert (start in layout.from_device) == first
        for row, pages in rows.pages.items():
            both = [pages, [page + OFFSET for page in pages]]
            assert mirror.pages[:, row, : len(pages)].tolist() == device_table[:, row, : len(pages)].tolist() == both


class Copies:
    """Stands for `Staging` where host and device are one."""

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def copy_into(self, target: torch.Tensor, array: npt.NDArray[Any]) -> None:
        target.copy_(torch.from_numpy(array.ravel().copy()))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("padding", [0, 2])
def test_a_device_finds_the_places_of_decodes(page_size: int, padding: int) -> None:
    rows, staging = Rows(page_size), Copies()
    inputs = CudaInputs(rows.limits, torch.device("cpu"), staging)  # type: ignore[arg-type]
    prompts = rows.plan({3: 4, 0: 7, 1: 1})
    inputs.lay_out(prompts, inputs.apply(prompts))
    inputs.advance(torch.tensor([3, 0, 1]), torch.tensor([33, 30, 31]))
    for _ in range(5):
        plan = rows.plan({})
        growth = inputs.apply(plan)
        inputs.send_decode(plan, growth, 3 + padding)
        ids, batch = inputs.decode_batch(3 + padding, few_keys=False)
        assert batch.rows.tolist() == [3, 0, 1] + [ROWS] * padding and ids[:3].tolist() == [33, 30, 31]
        assert batch.lengths.tolist() == [rows.lengths[row] for row in (3, 0, 1)] + [1] * padding
        assert batch.positions.tolist() == [*growth.context_lens.tolist()] + [0] * padding
        slots = [rows.slots(row, 1)[0] for row in (3, 0, 1)]
        assert batch.slots[0].tolist() == slots + [0] * padding
        assert batch.slots[1].tolist() == [slot + OFFSET * page_size for slot in slots] + [0] * padding
