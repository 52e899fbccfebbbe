"""Decodes of several tokens: what their rows compute and how many drafts hold, against plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from bough.kernels.drafted_decode.triton import count_held_, drafted_inputs_

ROWS, WIDTH, BATCH, DRAFTS = 9, 4, 5, 6  # the last row is padding


def step(device: torch.device) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Lines of a step, and what the device knows of rows: lengths, counts, last tokens."""
    draw = random.Random(3)
    lines = [
        [row, width, length, count, spare, *(draw.randint(0, 50) for _ in range(DRAFTS))]
        for row, width, length, count, spare in (
            (2, 4, -1, -1, 2),  # all by the device: it passes over one draft
            (0, 1, 7, 1, 0),
            (7, 3, 5, 3, 1),  # no more than there are
            (4, 4, -1, -1, 0),
            (8, 1, 0, 0, 0),
        )
    ]
    lengths = torch.arange(10, 10 + ROWS, dtype=torch.int32, device=device)
    counts = torch.full((ROWS,), 2, dtype=torch.int32, device=device)
    return lines, [lengths, counts, torch.arange(60, 60 + ROWS, device=device)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_it_says_what_each_row_computes(page_size: int, device: torch.device) -> None:
    lines, of_rows = step(device)
    tables = torch.arange(1, 1 + 2 * ROWS * 30, dtype=torch.int32, device=device).view(2, ROWS, 30)
    columns = torch.zeros((2, 100), dtype=torch.int32, device=device)[:, : WIDTH * BATCH]
    places = torch.zeros((4, 100), dtype=torch.int64, device=device)[:, : WIDTH * BATCH]
    packed = torch.tensor(lines, dtype=torch.int32, device=device)
    drafted_inputs_(packed, tuple(of_rows), tables, columns, places, page_size)
    for column in range(WIDTH):
        for place, (row, width, length, count, spare, *drafts) in enumerate(lines):
            at = column * BATCH + place
            if column >= width:
                assert columns[:, at].tolist() == [ROWS - 1, 1] and int(places[1, at]) == 0
                continue
            position = (length if length >= 0 else 10 + row) + column
            passed = min(max((count if count >= 0 else 2) - 1, 0), spare)
            token = 60 + row if column == 0 else drafts[passed + column - 1]
            slots = [
                int(table[row, position // page_size]) * page_size + position % page_size for table in tables.cpu()
            ]
            assert columns[:, at].tolist() == [row, position + 1]
            assert places[:, at].tolist() == [token, position, *slots]


def test_drafts_hold_while_they_are_what_was_sampled(device: torch.device) -> None:
    lines, of_rows = step(device)
    lengths, counts, last = of_rows
    drafts = torch.tensor([[9] * BATCH, [1, 0, 1, 1, 0], [2, 0, 2, 2, 0], [3, 0, 3, 3, 0]], device=device)
    tokens = torch.tensor([[1, 5, 1, 1, 0], [2, 0, 7, 2, 0], [4, 0, 3, 3, 0], [6, 0, 6, 8, 0]], device=device)
    bad = torch.zeros((WIDTH, BATCH), dtype=torch.bool, device=device)
    bad[1, 3] = True
    result = torch.zeros((WIDTH + 1) * BATCH, dtype=torch.int64, device=device)
    ends, generated = torch.zeros(BATCH, dtype=torch.int64, device=device), torch.full((ROWS,), 20, device=device)
    packed = torch.tensor(lines, dtype=torch.int32, device=device)
    count_held_(packed, tuple(of_rows), generated, drafts.view(-1), tokens.view(-1), bad.view(-1), result, ends)
    held = [3, 1, 2, 2, 1]  # the first row's third draft is wrong, the fourth row fails behind its first
    assert result[WIDTH * BATCH :].tolist() == held
    expected = tokens.clone()
    expected[1, 3] = -1
    assert result[: WIDTH * BATCH].view(WIDTH, BATCH).tolist() == expected.tolist()
    assert ends.tolist() == [(count - 1) * BATCH + place for place, count in enumerate(held)]
    rows = [line[0] for line in lines]
    assert [int(lengths[row]) for row in rows] == [12 + 3, 7 + 1, 5 + 2, 14 + 2, 0 + 1]
    assert [int(counts[row]) for row in rows] == held
    assert [int(last[row]) for row in rows] == [4, 5, 7, 2, 0]
    assert [int(generated[row]) for row in rows] == [20 + count for count in held]
    others = [row for row in range(ROWS) if row not in rows]
    assert lengths[others].tolist() == [10 + row for row in others] and last[others].tolist() == [
        60 + r for r in others
    ]
