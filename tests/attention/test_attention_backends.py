"""Which back end a name means, and that any two of them together compute what the reference does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bough.attention.base import AttentionBackend, AttentionSpec
from bough.attention.registry import BACKENDS, CAPTURABLE, BackendNames, build_backend, choose_backends
from bough.attention.split_backend import SplitAttention
from bough.attention.torch_backend import TorchAttention
from bough.attention.triton_backend import TritonAttention
from bough.core.errors import SettingsError
from bough.core.settings import ModelSettings
from bough.kernels.decode_attention.work import DecodeWork
from bough.kernels.prefill_attention.triton import config_for
from tests.fakes.attention_cases import HEAD_DIM, Case, error_of

COMBINATIONS = pytest.mark.parametrize("names", [("torch", "torch"), ("torch", "triton"), ("triton", "torch")])


def to_device(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def triton_attention(case: Case) -> TritonAttention:
    heads = case.kv_heads * case.group

    def make_work(layer: AttentionSpec) -> DecodeWork:
        return DecodeWork(
            8, heads, case.kv_heads, HEAD_DIM, torch.device("cpu"), window=layer.window, chunked=layer.chunked
        )

    return TritonAttention(to_device, make_work, config_for(heads, case.kv_heads, HEAD_DIM, torch.float32))


def combined(case: Case, prefill: str, decode: str) -> AttentionBackend:
    makers = {"torch": lambda: TorchAttention(to_device), "triton": lambda: triton_attention(case)}
    return build_backend(BackendNames(prefill, decode), makers)


@COMBINATIONS
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("decodes", "rows"),
    [
        (3, ((13, 1), (4, 1), (70, 1))),  # decodes alone
        (0, ((0, 20), (33, 1), (17, 9))),  # chunks alone, one of a single token
        (2, ((30, 1), (5, 1), (12, 7), (0, 9), (40, 1))),  # both
    ],
)
def test_any_two_give_what_the_reference_gives(
    names: tuple[str, str], page_size: int, decodes: int, rows: tuple[tuple[int, int], ...]
) -> None:
    case = Case(rows, page_size=page_size, group=2, decodes=decodes)
    assert error_of(case, combined(case, *names)) < 1e-4


@COMBINATIONS
@pytest.mark.parametrize(("window", "softcap", "sinks"), [(5, None, False), (None, 2.0, False), (5, None, True)])
def test_windows_caps_and_sinks(names: tuple[str, str], window: int | None, softcap: float | None, sinks: bool) -> None:
    case = Case(((30, 1), (3, 1), (12, 7), (0, 9)), group=4, window=window, softcap=softcap, decodes=2, sinks=sinks)
    assert error_of(case, combined(case, *names)) < 1e-4


@COMBINATIONS
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [1, 8, 20])
def test_windows_that_stand_side_by_side(names: tuple[str, str], page_size: int, window: int) -> None:
    rows = ((30, 1), (3, 1), (8, 1), (7, 1), (12, 30), (0, 19), (40, 1), (16, 4))
    case = Case(rows, page_size=page_size, group=4, window=window, decodes=4, chunked=True)
    assert error_of(case, combined(case, *names)) < 1e-4


@settings(deadline=None, max_examples=40)
@given(
    decodes=st.lists(st.integers(0, 90), max_size=4),
    chunks=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 30)), max_size=4),
    page_size=st.sampled_from([1, 16]),
    window=st.none() | st.integers(1, 40),
)
def test_a_step_cut_in_two_is_the_same_step(
    decodes: list[int], chunks: list[tuple[int, int]], page_size: int, window: int | None
) -> None:
    rows = (*((context, 1) for context in decodes), *chunks)
    if rows:
        case = Case(rows, page_size=page_size, window=window, decodes=len(decodes))
        assert error_of(case, SplitAttention(prefill=TorchAttention(), decode=TorchAttention())) < 1e-5


@pytest.mark.parametrize(
    ("device", "chosen", "names"),
    [
        ("cpu", {}, ("native", "native")),
        ("cpu", {"attention_backend": "torch"}, ("torch", "torch")),
        ("cpu", {"attention_backend": "torch_native"}, ("torch", "torch")),
        ("cuda", {}, ("triton", "triton")),
        ("cuda", {"attention_backend": "torch"}, ("torch", "torch")),
        ("cuda", {"prefill_attention_backend": "torch"}, ("torch", "triton")),
        ("cuda", {"attention_backend": "torch", "decode_attention_backend": "triton"}, ("torch", "triton")),
        ("cuda", {"attention_backend": "torch", "prefill_attention_backend": "auto"}, ("torch", "torch")),
    ],
)
def test_names_by_device(device: str, chosen: dict[str, str], names: tuple[str, str]) -> None:
    assert choose_backends(ModelSettings(**chosen), device) == BackendNames(*names)


@pytest.mark.parametrize(
    ("device", "chosen", "words"),
    [
        ("cuda", {"attention_backend": "flash9"}, "--attention-backend flash9: .*no such.* there is triton, torch"),
        (
            "cuda",
            {"attention_backend": "flashinfer"},
            "does not ship that back end; on this device there is triton.*nothing can be installed",
        ),
        ("cuda", {"attention_backend": "fa3"}, "does not ship that back end"),
        ("cpu", {"decode_attention_backend": "flash_attention"}, "--decode-attention-backend .*does not ship.*torch"),
        (
            "cpu",
            {"prefill_attention_backend": "triton"},
            r"does not run on this device \(cpu\); .*there is native, torch;",
        ),
    ],
)
def test_a_name_that_is_not_there_is_told_what_is(device: str, chosen: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        choose_backends(ModelSettings(**chosen), device)


def test_only_what_needs_no_lengths_on_the_host_is_captured() -> None:
    assert {*BACKENDS["cpu"], *BACKENDS["cuda"]} & {*CAPTURABLE} == {"triton"}
