"""What a step may need beside its forward pass, and that the blocks it counts on are what is computed at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.attention.torch_backend import scratch_bytes
from bough.core.settings import MemorySettings
from bough.executor.graphs import decode_sizes, mixed_sizes
from bough.executor.sizing import CacheShape, StepShape, size_gpu_cache

GIB = 2**30
QWEN = StepShape(512, 8192, 151_936, 1024, 40_960, 1, 2, 2)  # Qwen3-0.6B with the default flags
LLAMA = StepShape(512, 8192, 128_256, 4096, 131_072, 1, 2, 2)  # Llama-3.1-8B


def test_a_small_model_with_a_large_vocabulary_needs_more_for_sampling_than_for_its_layers() -> None:
    assert QWEN.step_bytes(10 * GIB) == 10 * GIB
    assert 0.5 * GIB < QWEN.step_bytes(100 << 20) < GIB


def test_logprobs_need_no_more_for_longer_prompts() -> None:
    """The logits of a block exist at once, and its results go to the host before the next block is computed."""
    assert QWEN.scoring_bytes() < 512 * 151_936 * 4
    assert replace(QWEN, chunk_tokens=100_000).scoring_bytes() == QWEN.scoring_bytes()


def test_rows_may_all_have_penalties_and_biases() -> None:
    assert QWEN.row_bytes() > 512 * 151_936 * 9 + 512 * 40_960 * 4


@pytest.mark.parametrize("shape", [QWEN, LLAMA])
def test_what_is_kept_for_special_requests_is_bounded(shape: StepShape) -> None:
    assert shape.step_bytes(0) + shape.row_bytes() < 1.6 * GIB


def test_graphs_share_the_memory_of_the_largest() -> None:
    decode, mixed = decode_sizes(512), mixed_sizes(8192, 8704, 218_103_808)
    logits = 512 * 151_936 * 2
    assert QWEN.graph_scratch_bytes((), (), GIB) == 0
    assert QWEN.graph_scratch_bytes(decode, (), 0) == QWEN.graph_scratch_bytes([512], (), 0) == logits
    assert QWEN.graph_scratch_bytes(decode, mixed, GIB) == GIB * mixed[-1] // 8704
    assert replace(QWEN, logit_itemsize=4).graph_scratch_bytes(decode, (), 0) == 5 * logits  # with widened copies


@given(rows=st.integers(1, 600), chunk=st.integers(1, 20_000), vocabulary=st.integers(1, 300_000))
def test_a_larger_step_never_needs_less(rows: int, chunk: int, vocabulary: int) -> None:
    shape = replace(QWEN, rows=rows, chunk_tokens=chunk, vocab_size=vocabulary)
    for larger in (
        replace(shape, rows=rows + 1),
        replace(shape, chunk_tokens=chunk + 1),
        replace(shape, vocab_size=vocabulary + 1),
    ):
        assert larger.step_bytes(0) >= shape.step_bytes(0) > 0
        assert larger.row_bytes() >= shape.row_bytes()


@pytest.mark.parametrize("capped", [False, True])
def test_gathered_keys_grow_with_the_context(capped: bool) -> None:
    short, long = (scratch_bytes(context, 32, 8, 128, 2, capped) for context in (40_000, 131_072))
    assert 2 * 40_000 * 8 * 128 * 2 < short < long < 6 * GIB


def test_steps_and_graphs_get_their_room_even_where_the_user_leaves_none() -> None:
    def pages(fraction: float, step: int, graphs: int) -> int:
        settings = MemorySettings(mem_fraction_static=fraction)
        sizes = {"free_bytes": 100 * GIB, "total_bytes": 140 * GIB, "shape": CacheShape(GIB)}
        return size_gpu_cache(settings, activation_bytes=step, graph_bytes=graphs, **sizes).pages[0]

    assert pages(1.0, 2 * GIB, 3 * GIB) == 95
    assert pages(0.9, 2 * GIB, 3 * GIB) == pages(0.9, 0, 0) == 86


@pytest.mark.parametrize(
    ("shape", "weight_bytes", "forward_bytes", "token_bytes", "tokens"),
    [(QWEN, 1.2e9, 220 << 20, 28 * 4096, 1_159_000), (LLAMA, 16.1e9, 920 << 20, 32 * 4096, 900_000)],
)
def test_tokens_that_fit_an_h200(
    shape: StepShape, weight_bytes: float, forward_bytes: int, token_bytes: int, tokens: int
) -> None:
    """With default flags, 139.8 GiB and 0.9 GiB of them taken by the driver."""
    total = int(139.8 * GIB)
    size = size_gpu_cache(
        MemorySettings(),
        free_bytes=total - int(weight_bytes) - int(0.9 * GIB),
        total_bytes=total,
        activation_bytes=shape.step_bytes(forward_bytes) + shape.row_bytes(),
        shape=CacheShape(token_bytes),
        graph_bytes=shape.graph_scratch_bytes(decode_sizes(512), [8704], forward_bytes) + GIB,
    )
    assert size.pages[0] == pytest.approx(tokens, rel=2e-3)
