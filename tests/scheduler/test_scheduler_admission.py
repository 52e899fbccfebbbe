"""What memory allows, as tables."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.core.model_config import FULL_ATTENTION, KVGroup
from bough.core.plan import Limits
from bough.core.settings import MemorySettings
from bough.scheduler.admission import (
    CLIPPED_NEW_TOKENS,
    DECAY_STEPS,
    Forecast,
    NewTokenRatio,
    prefill_budget,
    reserved_pages,
)
from bough.scheduler.prefix_cache import PrefixCache
from bough.scheduler.request import Request
from bough.scheduler.rows import RowTable
from bough.scheduler.running_batch import RunningBatch
from tests.fakes.boxes import waiting_request


@pytest.mark.parametrize(("conservativeness", "start"), [(0.0, 0.0), (0.5, 0.35), (1.0, 0.7), (10.0, 1.0)])
def test_the_ratio_falls_to_a_seventh_of_its_start_and_no_further(conservativeness: float, start: float) -> None:
    ratio = NewTokenRatio(conservativeness)
    assert ratio.value == pytest.approx(start)
    for _ in range(DECAY_STEPS + 100):
        ratio.after_decode()
    assert ratio.value == pytest.approx(start * 0.14)
    ratio.reset()
    assert ratio.value == pytest.approx(start)


@pytest.mark.parametrize(
    ("generated", "max_new", "requests", "expected"),
    [(0, 0, 0, 0.0), (30, 99, 1, 0.5), (100, 199, 5, 1.0), (500, 10, 1, 1.0)],
)
def test_a_retraction_sets_the_ratio_from_what_is_left(
    generated: int, max_new: int, requests: int, expected: float
) -> None:
    ratio = NewTokenRatio(1.0)
    ratio.after_retraction(generated, max_new, requests)
    assert ratio.value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rows", "ratio", "page_size", "expected"),
    [
        # each row: prompt still to compute, output still to come, unused places in its last page
        ([], 1.0, 4, 0),
        ([(0, 10, 0)], 0.5, 1, 5),
        ([(0, 10, 0)], 0.0, 1, 0),
        ([(6, 10, 0)], 0.0, 4, 2),
        ([(0, 3, 3)], 1.0, 4, 0),  # its own page has room for all
        ([(0, 4, 3)], 1.0, 4, 1),
        ([(0, 1, 0), (0, 1, 0)], 1.0, 64, 2),  # rows share no pages
        ([(0, 0, 5)], 1.0, 4, 0),
        ([(0, 10**6, 0)], 1.0, 1, CLIPPED_NEW_TOKENS),
    ],
)
def test_reserved_pages(rows: list[tuple[int, int, int]], ratio: float, page_size: int, expected: int) -> None:
    prompt, output, room = np.array(rows, dtype=np.int32).reshape(-1, 3).T
    assert reserved_pages(prompt, output, room, ratio, page_size).sum() == expected


@pytest.mark.parametrize(
    ("chunk_tokens", "max_prefill_tokens", "page_size", "expected"),
    [
        (2048, 16384, 1, 2048),
        (2048, 100, 1, 100),
        (2048, 8, 16, 16),  # never below a page
        (2048, 17, 16, 17),
        (64, 8, 64, 64),
        (40, 8, 64, 40),  # a context below a page: no prompt is longer than 40
    ],
)
def test_prefill_budget(chunk_tokens: int, max_prefill_tokens: int, page_size: int, expected: int) -> None:
    assert prefill_budget(chunk_tokens, max_prefill_tokens, page_size) == expected


def forecast_of(groups: tuple[KVGroup, ...], pages: tuple[int, ...]) -> tuple[Forecast, RunningBatch]:
    limits = Limits(2, 4, pages, 64, 100, 16, "test", groups=groups)
    batch = RunningBatch(RowTable(2, 64, 4, groups), PrefixCache(limits, MemorySettings()))
    return Forecast(batch, conservativeness=1.0), batch


def run(batch: RunningBatch, request: Request) -> None:
    batch.admit(request, batch.cache.match_and_lock(request.tokens, ""))


def test_a_forecast_weighs_a_request_against_those_that_run() -> None:
    forecast, batch = forecast_of((FULL_ATTENTION,), (20,))
    run(batch, waiting_request(prompt=list(range(6)), max_new_tokens=20))
    left = 20 - 5  # 6 of the prompt and 0.7 * 20 of the output, in pages of 4
    assert forecast.fits(waiting_request(prompt=[1] * 40, max_new_tokens=4 * left - 40))
    assert not forecast.fits(waiting_request(prompt=[1] * 40, max_new_tokens=4 * left - 39))
    assert forecast.fits(waiting_request(prompt=[1] * 40, max_new_tokens=4 * left - 39), cached=4)
    resumed = waiting_request(prompt=[1] * 40, prompt_len=38, max_new_tokens=4 * left - 38)
    assert forecast.fits(resumed)  # 2 of its output are there


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40), st.integers(0, 10)), min_size=1, max_size=12))
def test_requests_that_begin_together_are_weighed_as_one_by_one(requests: list[tuple[int, int, int]]) -> None:
    """Each is a prompt, its output, and how much of the prompt the step computes at once."""
    limits = Limits(12, 4, (40,), 80, 100, 16, "test")
    batch = RunningBatch(RowTable(12, 80, 4), PrefixCache(limits, MemorySettings(disable_radix_cache=True)))
    forecast, plain = (Forecast(batch, conservativeness=1.0) for _ in range(2))
    for number, (prompt, output, count) in enumerate(requests):
        request = waiting_request(number, [number] * prompt, max_new_tokens=output)
        fits = forecast.fits(request, another=number > 0)
        assert fits is plain.fits(request)
        if not fits:
            break
        run(batch, request)
        batch.grow(request.row, min(count, prompt))


def test_a_window_is_needed_once_however_long_a_request_becomes() -> None:
    """A row keeps 5 pages of a window of 8: 2, one before, and parts at both ends."""
    for pages, fits in ((9, False), (10, True)):
        forecast, batch = forecast_of((FULL_ATTENTION, KVGroup("window", 8)), (40, pages))
        run(batch, waiting_request(prompt=list(range(30)), max_new_tokens=20))
        assert forecast.fits(waiting_request(prompt=[1] * 40, max_new_tokens=16)) is fits
        assert forecast.fits(waiting_request(prompt=[1] * 12, max_new_tokens=4))  # shorter than a window
