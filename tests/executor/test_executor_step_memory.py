"""What a step may need beside its forward pass, and that the blocks it counts on are what is computed at once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bough.attention.torch_backend import scratch_bytes
from bough.core.sampling_params import MAX_LOGPROBS
from bough.core.settings import MemorySettings
from bough.executor.graphs import decode_sizes, mixed_sizes
from bough.executor.sizing import size_gpu_cache
from bough.executor.step_memory import StepShape

GIB = 2**30
QWEN = StepShape(512, 8192, 151_936, 1024, 40_960, 1, 2, 2)


def test_a_small_model_with_a_large_vocabulary_needs_more_for_sampling_than_for_its_layers() -> None:
    assert QWEN.step_bytes(10 * GIB) == 10 * GIB
    assert 0.9 * GIB < QWEN.step_bytes(100 << 20) < 3 * GIB


def test_prompts_never_have_all_their_logits_at_once() -> None:
    assert QWEN.scoring_bytes() < 8192 * 151_936 * 2
    told = (100_000 - 8192) * MAX_LOGPROBS * 24  # ids and logprobs, of the blocks and of all
    assert replace(QWEN, chunk_tokens=100_000).scoring_bytes() == QWEN.scoring_bytes() + told


def test_rows_may_all_have_penalties_and_biases() -> None:
    assert QWEN.row_bytes() > 512 * 151_936 * 9 + 512 * 40_960 * 4


def test_graphs_keep_their_logits() -> None:
    sizes = decode_sizes(512)
    assert QWEN.graph_bytes((), (), GIB) == 0
    assert QWEN.graph_bytes(sizes, (), GIB) > sum(sizes) * 151_936 * 2
    assert replace(QWEN, logit_itemsize=4).graph_bytes(sizes, (), GIB) > sum(sizes) * 151_936 * 4
    assert QWEN.graph_bytes(sizes, mixed_sizes(8704), GIB) > QWEN.graph_bytes(sizes, (), GIB) + GIB // 4


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


def test_graphs_get_their_room_even_where_the_user_leaves_none() -> None:
    def pages(fraction: float, graphs: int) -> int:
        settings = MemorySettings(mem_fraction_static=fraction)
        sizes = {"free_bytes": 100 * GIB, "total_bytes": 140 * GIB, "activation_bytes": 0, "bytes_per_token": GIB}
        return size_gpu_cache(settings, graph_bytes=graphs, **sizes).pages

    assert pages(1.0, 3 * GIB) == 97
    assert pages(0.9, 3 * GIB) == pages(0.9, 0) == 86
