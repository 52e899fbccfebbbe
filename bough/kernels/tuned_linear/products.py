# mypy: disable-error-code="no-untyped-call"
"""Which algorithm a product takes: measured on the model's own weights, for numbers of rows that come again and again.

One `Products` belongs to each device. It knows no model: `prepare` is told for how many rows to measure, and shown the
weights by a forward pass; each call of `tune` measures one of them. Until then, and wherever torch's own choice is as
good, `find` has nothing to offer. What was measured for a full chunk of prompts is good for those that are nearly full;
of fewer rows only exactly as many as were measured, because what is best for one number of rows is worse than
torch's choice for the next (`gpu_bench_tuned_linear.py`).
"""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from bough.core.errors import BoughError
from bough.kernels.tuned_linear.cublaslt import ALIGNMENT, TYPES, Algorithm, CublasLt

log = logging.getLogger(__name__)

ROUNDS = 3
GAIN = 0.98  # of torch's time: less must be left of it for another algorithm to be taken
NEAR = 0.2  # of a full chunk's rows: so many more or less take the same algorithm
TOLERANCE = 0.02  # of the largest result: 16-bit results summed in another order
CHECKED_ROWS = 256
LEAST_CHUNK = 4096  # below, a few rows more or less change which algorithm is best
HEAT_S = 0.05  # of products before those that are measured: a device that is hot, as in a long load, runs slower
HEAT_PRODUCTS = 8  # that are queued at a time
AHEAD_CYCLES = 200_000  # the device waits so long for each product of a round, while the host queues them

Shape = tuple[int, int, torch.dtype]  # outputs, inputs


class Products:
    """Owns the choice of algorithms on one device."""

    def __init__(self, library: CublasLt | None) -> None:
        self._library = library
        self._shown: dict[Shape, torch.Tensor] | None = None  # one weight of each shape, while a forward pass runs
        self._chunk = 0  # rows of a full one; 0: nothing is measured for it
        self._waiting: list[tuple[int, torch.Tensor]] = []  # rows and weights to be measured, the last one first
        self._chosen: dict[tuple[int, Shape], Algorithm | None] = {}  # by the rows that were measured; None: torch's
        self._known: dict[tuple[int, Shape], Algorithm | None] = {}  # by rows: what `find` has answered

    def find(self, x: torch.Tensor, weight: torch.Tensor) -> Algorithm | None:
        """The algorithm for this product, if one is faster than torch's."""
        if self._shown is not None and weight.dtype in TYPES and _aligned(weight):
            self._shown.setdefault(_shape(weight), weight)
        if not self._chosen or not _aligned(x):
            return None
        key = (x.shape[0], _shape(weight))
        if key not in self._known:
            self._known[key] = self._supported(*key)
        return self._known[key]

    def multiply(self, algorithm: Algorithm, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x @ weight.T."""
        assert self._library is not None
        return self._library.multiply(algorithm, x, weight, x.new_empty((x.shape[0], weight.shape[0])))

    def prepare(self, chunk: int, others: Sequence[int], forward: Callable[[], object]) -> None:
        """Products of a full chunk's rows and of these other numbers of rows, with every weight that `forward`
        multiplies with, are to be measured."""
        self._chunk, self._waiting = 0, []
        self._chosen.clear()
        self._known.clear()
        if self._library is None:
            return
        self._shown = {}
        try:
            forward()
        finally:
            shown, self._shown = self._shown, None
        self._chunk = chunk if chunk >= LEAST_CHUNK else 0
        rows = sorted({*others, *([chunk] if self._chunk else [])})
        self._waiting = [(count, weight) for count in rows for weight in shown.values()]

    def tune(self) -> bool:
        """Measures the products with one weight; False when none is left. Nothing else may be at work on the device."""
        if not self._waiting or self._library is None:
            return False
        rows, weight = self._waiting.pop()
        try:
            algorithm = _fastest(self._library, rows, weight)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            algorithm = None
        self._chosen[rows, _shape(weight)] = algorithm
        self._known.clear()
        return True

    def serves(self, rows: int) -> bool:
        """Whether products of so many rows take another algorithm than torch's."""
        return any(self._supported(rows, shape) is not None for _, shape in self._chosen)

    def _supported(self, rows: int, shape: Shape) -> Algorithm | None:
        measured = rows
        if (rows, shape) not in self._chosen and abs(rows - self._chunk) <= NEAR * self._chunk:
            measured = self._chunk
        algorithm = self._chosen.get((measured, shape))
        if algorithm is None or self._library is None or not self._library.supports(algorithm, rows, *shape):
            return None
        return algorithm


def _shape(weight: torch.Tensor) -> Shape:
    return (*weight.shape, weight.dtype)


@functools.cache
def products_on(device: torch.device) -> Products:
    """The owner for this device; one that never has anything to offer where the library is missing."""
    if device.type != "cuda" or torch.version.cuda is None:
        return Products(None)
    try:
        return Products(CublasLt(device))
    except (OSError, BoughError) as error:
        log.info("matrix products are left to torch's choice of algorithms: %s", error)
        return Products(None)


def _aligned(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def _fastest(library: CublasLt, rows: int, weight: torch.Tensor) -> Algorithm | None:
    """The algorithm that is faster than torch's by more than measurements differ, twice; or None."""
    n, k = weight.shape
    x, out = weight.new_empty((rows, k)).normal_(), weight.new_empty((rows, n))
    ways = [way for way in (None, *library.proposals(rows, n, k, weight.dtype)) if _works(library, way, x, weight, out)]
    _heat(library, x, weight, out)
    times = _measure(library, ways, x, weight, out)
    best = min(range(len(ways)), key=times.__getitem__)
    if times[best] > GAIN * times[0]:
        return None
    first, again = _measure(library, [None, ways[best]], x, weight, out)  # the least of many is often luck
    return ways[best] if again <= GAIN * first else None


def _heat(library: CublasLt, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Brings the device to the clock that it keeps up. Which algorithm is fastest depends on it."""
    until = time.monotonic() + HEAT_S
    while time.monotonic() < until:
        for _ in range(HEAT_PRODUCTS):
            _multiply(library, None, x, weight, out)
        torch.cuda.synchronize()


def _measure(
    library: CublasLt, ways: Sequence[Algorithm | None], x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> list[float]:
    """The milliseconds that each takes, measured in turn."""
    rounds = []
    for _ in range(ROUNDS):
        torch.cuda._sleep(AHEAD_CYCLES * len(ways))
        rounds.append([_queue(library, way, x, weight, out) for way in ways])
    torch.cuda.synchronize()
    return [statistics.median(begun.elapsed_time(done) for begun, done in way) for way in zip(*rounds, strict=True)]


def _works(library: CublasLt, way: Algorithm | None, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """Runs it once, which also loads its code, and looks at some of what it computes."""
    try:
        _multiply(library, way, x, weight, out)
    except BoughError as error:
        log.debug("a proposed algorithm for %d x %d is left out: %s", *weight.shape, error)
        return False
    expected = F.linear(x[:CHECKED_ROWS], weight)
    return bool((out[:CHECKED_ROWS] - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _queue(
    library: CublasLt, way: Algorithm | None, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """One measurement, between two events."""
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    _multiply(library, way, x, weight, out)
    done.record()
    return begun, done


def _multiply(
    library: CublasLt, way: Algorithm | None, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> None:
    if way is None:
        torch.mm(x, weight.t(), out=out)
    else:
        library.multiply(way, x, weight, out)
