"""Counts requests and tokens with a few additions, without locks or objects.

A counter is one number; a histogram is one per bucket, one beyond the last, and the sum.
"""

import mmap
from array import array
from bisect import bisect_left
from collections.abc import MutableSequence, Sequence
from itertools import accumulate
from pathlib import Path
from typing import cast

from bough.observability.metrics import BY_NAME, REQUEST_METRICS, Metric


def width(metric: Metric) -> int:
    return len(metric.buckets) + 2 if metric.kind == "histogram" else 1


_BOUNDS = {metric.name: metric.buckets for metric in REQUEST_METRICS}
_FIRST = dict(zip(_BOUNDS, accumulate(map(width, REQUEST_METRICS), initial=0), strict=False))
_SIZE = sum(map(width, REQUEST_METRICS))
_FIRST_TOKENS, _FURTHER_TOKENS = (
    slice(_FIRST[name], _FIRST[name] + len(_BOUNDS[name]) + 1)
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds")
)
_GAPS = _FIRST["inter_token_latency_seconds"]
_GAP_BOUNDS = _BOUNDS["inter_token_latency_seconds"]
_GAP_SUM = _GAPS + len(_GAP_BOUNDS) + 1
DOUBLE = 8  # bytes


def slices(numbers: Sequence[float]) -> dict[Metric, Sequence[float]]:
    return {BY_NAME[name]: numbers[first : first + width(BY_NAME[name])] for name, first in _FIRST.items()}


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
        found = [path.read_bytes() for path in self._folder.glob("counts*")]
        whole = (content for content in found if len(content) == self._size * DOUBLE)  # others are just being made
        rows = [array("d", content) for content in whole]
        return [sum(column) for column in zip(*rows, strict=True)]


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
        totals[_FIRST["generation_tokens_total"]] = sum(totals[_FIRST_TOKENS]) + sum(totals[_FURTHER_TOKENS])
        return totals

    def http_requests(self, change: int) -> None:
        """So many more HTTP requests are in progress."""
        self._add("http_requests_active", change)

    def started(self, prompt_tokens: int, cached_tokens: int, queue_s: float) -> None:
        """The prompt has been computed."""
        self._add("prompt_tokens_total", prompt_tokens)
        self._add("cached_tokens_total", cached_tokens)
        self._observe("prompt_tokens_histogram", prompt_tokens)
        self._observe("queue_time_seconds", queue_s)

    def first_token(self, after_s: float) -> None:
        self._observe("time_to_first_token_seconds", after_s)

    def more_tokens(self, count: int, within_s: float) -> None:
        """Called for each chunk of a stream, and therefore written out."""
        cells = self.cells
        cells[_GAPS + bisect_left(_GAP_BOUNDS, within_s / count)] += count
        cells[_GAP_SUM] += within_s

    def media(self, nbytes: int, *, cached: bool) -> None:
        """An image, a clip or a recording has come."""
        self._add("media_bytes_total", nbytes)
        self._add("media_cache_hits_total", int(cached))

    def prepared_media(self, within_s: float) -> None:
        self._observe("media_preparation_seconds", within_s)

    def ended(self, output_tokens: int, total_s: float, retractions: int, *, incomplete: bool) -> None:
        self._add("num_requests_total", 1)
        self._add("num_aborted_requests_total", int(incomplete))
        self._observe("generation_tokens_histogram", output_tokens)
        self._observe("e2e_request_latency_seconds", total_s)
        self._observe("num_retractions", retractions)

    def _add(self, name: str, amount: float) -> None:
        self.cells[_FIRST[name]] += amount

    def _observe(self, name: str, value: float) -> None:
        first, bounds = _FIRST[name], _BOUNDS[name]
        self.cells[first + bisect_left(bounds, value)] += 1
        self.cells[first + len(bounds) + 1] += value
