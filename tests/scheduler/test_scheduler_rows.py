"""The row table: how large it may be, and what a row remembers of its owner."""

from __future__ import annotations

import numpy as np
import pytest

from bough.core.errors import ResourceError
from bough.scheduler.rows import Phase, RowTable
from tests.fakes.boxes import waiting_request


@pytest.mark.parametrize(("rows", "context_length", "page_size"), [(100_000_000, 40960, 1), (2**20, 2**17, 64)])
def test_too_many_rows_are_refused_with_the_setting_to_change(
    monkeypatch: pytest.MonkeyPatch, rows: int, context_length: int, page_size: int
) -> None:
    monkeypatch.setattr(np, "zeros", None)  # nothing is even tried
    with pytest.raises(ResourceError, match=f"{rows} rows .--max-running-requests.*set --max-running-requests to") as e:
        RowTable(rows, context_length, page_size)
    advised = int(str(e.value).split("set --max-running-requests to ")[1].split()[0])
    row_bytes = 4 * (context_length + -(-context_length // page_size))
    assert 0 < advised * row_bytes <= 2**36


def test_a_machine_that_cannot_hold_the_tables_is_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "zeros", refuse)
    with pytest.raises(ResourceError, match="set --max-running-requests to 128 or less"):
        RowTable(256, 4096, 1)


def test_a_row_forgets_its_owner_and_the_request_keeps_its_tokens() -> None:
    table = RowTable(2, 8, 1)
    request = waiting_request(prompt=[5, 6], max_new_tokens=3, stop_token_ids=(1,))
    row = table.assign(request)
    serial = int(table.serial[row])
    assert (request.row, table.running, table.free_rows) == (row, 1, 1)
    assert table.phase[row] == Phase.PREFILL and table.has_stop_ids[row] and table.heeds_eos[row]
    table.tokens[row, 2], table.known[row] = 9, 3
    table.free(request)
    assert request.row == -1 and request.tokens.tolist() == [5, 6, 9] and request.generated == 1
    assert table.phase[row] == Phase.FREE and table.running == 0
    assert table.assign(request) == row and table.serial[row] not in (0, serial)
    assert table.sampled[row] == 1


def test_prompts_go_on_in_order_of_arrival() -> None:
    table = RowTable(4, 8, 1)
    rows = {arrival: table.assign(waiting_request(arrival)) for arrival in (2, 0, 1)}
    assert table.prefilling() == [rows[0], rows[1], rows[2]]
    table.phase[rows[1]] = Phase.DECODE
    assert table.decoding().tolist() == [rows[1]]
