"""The torch back end against the naive reference, over ragged batches, page sizes, windows, caps and types."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.attention import torch_backend
from bough.attention.base import AttentionSpec
from tests.fakes import attention_cases
from tests.fakes.attention_cases import Case


def error_of(case: Case) -> float:
    return attention_cases.error_of(case, torch_backend.TorchAttention())


@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(
    "rows",
    [
        ((0, 1),),  # the first token of all
        ((17, 1),),
        ((0, 20),),
        ((13, 1), (4, 1), (9, 1)),  # one padded group
        ((700, 1), (3, 1), (600, 1), (5, 1)),  # two groups, interleaved
        ((30, 1), (0, 1), (12, 7), (0, 9), (400, 3)),  # decodes and prefills mixed
        ((20, 600), (0, 257)),  # prefills of several query blocks, with and without a cached prefix
    ],
)
def test_equals_the_reference(rows: tuple[tuple[int, int], ...], window: int | None, softcap: float | None) -> None:
    assert error_of(Case(rows, window=window, softcap=softcap)) < 1e-5
    assert error_of(Case(rows, page_size=16, window=window, softcap=softcap, scattered=False)) < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_16_bit_caches(dtype: torch.dtype, tolerance: float, softcap: float | None) -> None:
    case = Case(((30, 1), (3, 1), (12, 7), (0, 9)), page_size=4, dtype=dtype, softcap=softcap)
    assert error_of(case) < tolerance
    assert error_of(replace(case, input_dtype=torch.float32)) < tolerance


@settings(deadline=None, max_examples=60)
@given(
    rows=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), min_size=1, max_size=6),
    lone_queries=st.booleans(),
    page_size=st.sampled_from([1, 3, 16]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 4]),
    window=st.none() | st.integers(1, 40),
    softcap=st.none() | st.just(1.5),
    scattered=st.booleans(),
    chunked=st.booleans(),
    block=st.sampled_from([4, 256]),
)
def test_any_batch_equals_the_reference(
    rows: list[tuple[int, int]],
    lone_queries: bool,
    page_size: int,
    kv_heads: int,
    group: int,
    window: int | None,
    softcap: float | None,
    scattered: bool,
    chunked: bool,
    block: int,
) -> None:
    shape = tuple((context, 1) for context, _ in rows) if lone_queries else tuple(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "QUERY_BLOCK", block)
        assert error_of(Case(shape, page_size, kv_heads, group, window, softcap, scattered, chunked=chunked)) < 1e-5


def test_scores_of_capped_layers_are_computed_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "MAX_SCORES", 3000)
    assert error_of(Case(((20, 300), (0, 9)), softcap=2.0)) < 1e-5


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("group", [1, 3])
def test_sinks_take_their_share_of_each_softmax(window: int | None, softcap: float | None, group: int) -> None:
    rows = ((30, 1), (0, 1), (12, 7), (0, 9), (400, 300))
    case = Case(rows, group=group, window=window, softcap=softcap, sinks=True)
    assert error_of(case) < 1e-5
    assert error_of(replace(case, rows=((13, 1), (4, 1)), page_size=4)) < 1e-5


def test_sinks_are_those_of_gpt_oss() -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    torch.manual_seed(1)
    q, k, v = torch.randn(1, 6, 5, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    mask = torch.zeros(5, 11).masked_fill_(torch.rand(5, 11) < 0.3, float("-inf"))
    module = torch.nn.Module()
    module.sinks, module.num_key_value_groups = torch.nn.Parameter(torch.randn(6)), 3
    expected, _ = eager_attention_forward(module.eval(), q, k, v, mask[None, None], scaling=0.4)
    layer = AttentionSpec(0, 0.4, None, None, 6, 2, 8, sinks=module.sinks.detach())
    torch.testing.assert_close(torch_backend.attend(q, k, v, mask, layer), expected.transpose(1, 2).detach())


@pytest.mark.parametrize("masked", [False, True])
def test_key_heads_as_a_batch_give_the_same(masked: bool) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(1, 6, 5, 8), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8)
    mask = torch.zeros(5, 11).masked_fill_(torch.rand(5, 11) < 0.3, float("-inf")) if masked else None
    layer = AttentionSpec(0, 0.4, None, None, 6, 2, 8)
    expected = torch_backend.attend(q, k, v, mask, layer)
    torch.testing.assert_close(torch_backend._attend_by_kv_head(q, k, v, mask, layer), expected)


def test_no_kernel_is_built_for_every_length() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch_backend.leave_out_cudnn()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
