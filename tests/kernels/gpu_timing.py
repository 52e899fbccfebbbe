"""What the benchmark scripts share: the time of a short kernel, inside a CUDA graph as it will be used."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from triton.runtime.errors import OutOfResources  # type: ignore[import-untyped]

LAUNCHES = 20


def graph_us(launch: Callable[[int], object], replays: int = 7) -> float:
    """Microseconds of one launch: the median replay of a graph of twenty, numbered so that they can rotate inputs."""
    launch(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(LAUNCHES):
            launch(number)
    graph.replay()
    times = [replay_us(graph.replay) / LAUNCHES for _ in range(replays)]
    return float(statistics.median(times))


def replay_us(replay: Callable[[], object]) -> float:
    """Microseconds that a captured graph takes on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    replay()
    end.record()
    end.synchronize()
    return 1000 * float(start.elapsed_time(end))


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, by norm."""
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def compile_all(launches: Iterable[Callable[[], object]]) -> list[bool]:
    """Runs each once, which compiles its kernel, on several threads; says which of them fit the device."""

    def fits(launch: Callable[[], object]) -> bool:
        try:
            launch()
        except OutOfResources:
            return False
        return True

    # A thread that has called CUDA once has a context, which tensor descriptors need.
    with ThreadPoolExecutor(12, initializer=torch.cuda.synchronize) as pool:
        return list(pool.map(fits, launches))


def table_row(cells: Sequence[object], widths: Sequence[int]) -> str:
    return " ".join(f"{cell:>{width}}" for cell, width in zip(map(str, cells), widths, strict=True))
