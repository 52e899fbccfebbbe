"""Counts requests and tokens with a few additions, without locks or objects.

A counter is one number; a histogram is one per bucket, one beyond the last, and the sum.
"""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_left
from collections.abc import MutableSequence, Sequence
from itertools import accumulate
from pathlib import Path
from typing import cast

from bough.observability import metrics
from bough.observability.metrics import REQUEST_METRICS, Metric


def width(metric: Metric) -> int:
    return len(metric.buckets) + 2 if metric.kind == "histogram" else 1


_FIRST = dict(zip(REQUEST_METRICS, accumulate(map(width, REQUEST_METRICS), initial=0), strict=False))
_SIZE = sum(map(width, REQUEST_METRICS))
_FIRST_TOKENS, _FURTHER_TOKENS = (
    slice(_FIRST[metric], _FIRST[metric] + len(metric.buckets) + 1)
    for metric in (metrics.TIME_TO_FIRST_TOKEN, metrics.INTER_TOKEN_LATENCY)
)
_GAPS = _FIRST[metrics.INTER_TOKEN_LATENCY]
_GAP_BOUNDS = metrics.INTER_TOKEN_LATENCY.buckets
_GAP_SUM = _GAPS + len(_GAP_BOUNDS) + 1
DOUBLE = 8  # bytes


def slices(numbers: Sequence[float]) -> dict[Metric, Sequence[float]]:
    return {metric: numbers[first : first + width(metric)] for metric, first in _FIRST.items()}


class Counts:
    """`size` doubles of one process. With several processes each writes a file of its own in a shared folder, mapped
    into memory; a double is written whole, so totals need no lock."""

    def __init__(self, size: int, folder: Path | None = None, number: int = 0) -> None:
        self._size = size
        self._folder = folder
        memory = bytearray(size * DOUBLE) if folder is None else _map(folder / f"counts{number}", size * DOUBLE)
        self.cells: MutableSequence[float] = cast(MutableSequence[float], memoryview(memory).cast("d"))

    def totals(self) -> list[float]:
        if self._folder is None:
            return list(self.cells)
        rows = [array("d", content) for content in self._contents(self._folder)]
        return [sum(column) for column in zip(*rows, strict=True)]

    def _contents(self, folder: Path) -> list[bytes]:
        found = [path.read_bytes() for path in folder.glob("counts*")]
        return [content for content in found if len(content) == self._size * DOUBLE]  # others are just being made


def _map(path: Path, size: int) -> mmap.mmap:
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


class RequestMeter(Counts):
    """Times are in seconds. With a folder, `totals` are those of all processes that share it."""

    def __init__(self, folder: Path | None = None, number: int = 0) -> None:
        super().__init__(_SIZE, folder, number)

    def totals(self) -> list[float]:
        totals = super().totals()
        # Every token is a first or a further one: counting it once is enough.
        totals[_FIRST[metrics.GENERATION_TOKENS_TOTAL]] = sum(totals[_FIRST_TOKENS]) + sum(totals[_FURTHER_TOKENS])
        return totals

    def http_requests(self, change: int) -> None:
        """So many more HTTP requests are in progress."""
        self._add(metrics.HTTP_REQUESTS_ACTIVE, change)

    def started(self, prompt_tokens: int, cached_tokens: int, queue_s: float) -> None:
        """The prompt has been computed."""
        self._add(metrics.PROMPT_TOKENS_TOTAL, prompt_tokens)
        self._add(metrics.CACHED_TOKENS_TOTAL, cached_tokens)
        self._observe(metrics.PROMPT_TOKENS, prompt_tokens)
        self._observe(metrics.QUEUE_TIME, queue_s)

    def first_token(self, after_s: float) -> None:
        self._observe(metrics.TIME_TO_FIRST_TOKEN, after_s)

    def more_tokens(self, count: int, within_s: float) -> None:
        """Called for each chunk of a stream, and therefore written out."""
        cells = self.cells
        cells[_GAPS + bisect_left(_GAP_BOUNDS, within_s / count)] += count
        cells[_GAP_SUM] += within_s

    def media(self, nbytes: int, *, cached: bool) -> None:
        """An image, a clip or a recording has come."""
        self._add(metrics.MEDIA_BYTES_TOTAL, nbytes)
        self._add(metrics.MEDIA_CACHE_HITS_TOTAL, int(cached))

    def prepared_media(self, within_s: float) -> None:
        self._observe(metrics.MEDIA_PREPARED_SECONDS, within_s)

    def ended(self, output_tokens: int, total_s: float, retractions: int, *, incomplete: bool) -> None:
        self._add(metrics.NUM_REQUESTS_TOTAL, 1)
        self._add(metrics.NUM_ABORTED_REQUESTS_TOTAL, int(incomplete))
        self._observe(metrics.GENERATION_TOKENS, output_tokens)
        self._observe(metrics.E2E_REQUEST_LATENCY, total_s)
        self._observe(metrics.NUM_RETRACTIONS, retractions)

    def _add(self, metric: Metric, amount: float) -> None:
        self.cells[_FIRST[metric]] += amount

    def _observe(self, metric: Metric, value: float) -> None:
        first, bounds = _FIRST[metric], metric.buckets
        self.cells[first + bisect_left(bounds, value)] += 1
        self.cells[first + len(bounds) + 1] += value
