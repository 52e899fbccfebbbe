"""Which steps get a CUDA graph, and when."""

from __future__ import annotations

import itertools

import pytest
import torch

from bough.executor.graphs import (
    FINE_STEP,
    FINE_TOKENS,
    CudaGraphs,
    decode_sizes,
    mixed_sizes,
)

SMALL, LARGE = 15_728_640, 218_103_808  # weights in a layer of Qwen3-0.6B and of Llama-3.1-8B


@pytest.mark.parametrize("largest", [1, 7, 16, 256, 500, 512, 1000])
def test_decode_sizes_end_at_the_largest_and_waste_little(largest: int) -> None:
    sizes = decode_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest
    for batch in range(1, largest + 1):
        padded = next(size for size in sizes if size >= batch)
        assert padded - batch < max(2, 8, batch // 8)


@pytest.mark.parametrize(("chunk", "largest"), [(16, 17), (64, 80), (2048, 2304), (8192, 8704)])
def test_mixed_sizes_hold_every_step_of_a_small_model_and_waste_little(chunk: int, largest: int) -> None:
    sizes = mixed_sizes(chunk, largest, SMALL)
    assert sizes == sorted(set(sizes)) and sizes[-1] == largest and chunk in sizes
    for tokens in range(1, largest + 1):
        padded = next(size for size in sizes if size >= tokens)
        assert padded - tokens < max(16, tokens // 8 + 1, 96 if tokens < 512 else 0, 256 if tokens > chunk else 0)
        assert padded - tokens < FINE_STEP or not 512 < tokens <= min(chunk, FINE_TOKENS)


def test_mixed_sizes_of_a_large_model_end_where_launching_is_hidden() -> None:
    assert mixed_sizes(8192, 8704, LARGE) == [n for n in mixed_sizes(8192, 8704, SMALL) if n <= FINE_TOKENS]
    assert mixed_sizes(8192, 8704, LARGE)[-1] == FINE_TOKENS
    assert mixed_sizes(2048, 2304, LARGE)[-1] == 2304


@pytest.mark.parametrize("tokens", [512, 1024, 1536, 2048, 2560, 3072])
def test_steps_that_fill_the_devices_tiles_need_no_padding(tokens: int) -> None:
    assert tokens in mixed_sizes(8192, 8704, LARGE)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return []


def make_graphs(captured: list[int]) -> CudaGraphs[str]:
    def capture(size: int) -> str:
        captured.append(size)
        return f"graph of {size}"

    return CudaGraphs("decode", [1, 2, 4, 8], capture)


def test_quiet_moments_capture_all_sizes_smallest_first(captured: list[int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="bough")
    graphs = make_graphs(captured)
    while graphs.capture_next():
        pass
    assert captured == [1, 2, 4, 8]
    assert graphs.find(3) == (4, "graph of 4")
    assert graphs.find(9) is None
    assert [record.getMessage() for record in caplog.records] == ["all 4 decode graphs are captured, up to size 8"]


def test_without_sizes_there_is_nothing_to_capture() -> None:
    graphs = CudaGraphs("decode", [], str)
    assert not graphs.capture_next() and graphs.find(1) is None


def test_steps_capture_nothing_and_say_which_size_is_wanted(captured: list[int]) -> None:
    graphs = make_graphs(captured)
    assert all(graphs.find(count) is None for count in (3, 8, 8, 4, 8))
    assert not captured and graphs.most_wanted == (3, 8)
    assert not graphs.capture_next(least=4)
    while graphs.capture_next(least=2):
        pass
    assert captured == [8, 4], "those that were not used are left to quiet moments"
    assert graphs.find(7) == (8, "graph of 8")


def test_ranks_that_run_the_same_steps_take_the_same_graphs(
    captured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a capture takes on each of them."""
    clock = itertools.count()
    ranks = [make_graphs(captured), make_graphs([])]
    taken: list[list[object]] = [[], []]
    for rank, (graphs, found) in enumerate(zip(ranks, taken, strict=True)):
        monkeypatch.setattr("time.monotonic", lambda rank=rank: next(clock) * (1 + 100 * rank))
        for step in range(128):
            found.append(graphs.find(1 + step * step % 8))
            if step % 32 == 31:
                graphs.capture_next(least=3)
    assert taken[0] == taken[1] and captured
