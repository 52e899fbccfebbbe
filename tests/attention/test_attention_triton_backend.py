"""The Triton back end on a tiny model gives what the torch back end gives: prompts, chunks, decodes, mixtures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bough.attention.base import AttentionSpec
from bough.attention.split_backend import SplitAttention
from bough.attention.triton_backend import TritonAttention
from bough.core.model_config import ModelConfig, RopeConfig
from bough.distributed.topology import Topology
from bough.kernels.decode_attention.work import DecodeWork
from bough.kernels.prefill_attention.triton import config_for
from bough.layers.attention import SelfAttention
from bough.layers.weights import WeightSlot
from bough.models.registry import build_model
from tests.fakes.forward import Forward, load_model
from tests.fakes.triton_interpreter import INTERPRETED_PROGRAMS

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=60,
    context_length=128,
    norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    tied_embeddings=True,
)
STEPS = [
    {0: [1, 2, 3, 4, 5], 1: [9, 8]},
    {0: [6], 1: [7]},
    {0: [3], 1: [4], 2: [5, 6, 7, 8, 9, 10, 11]},
    {1: [2], 2: [1]},
]


def triton_backend(config: ModelConfig) -> TritonAttention:
    def make_work(layer: AttentionSpec) -> DecodeWork:
        shape = (8, layer.heads, layer.kv_heads, layer.head_dim, torch.device("cpu"))
        return DecodeWork(*shape, window=layer.window, programs=INTERPRETED_PROGRAMS)

    prefill = config_for(config.num_heads, config.num_kv_heads, config.head_dim, torch.float32)
    return TritonAttention(lambda array: torch.from_numpy(np.ascontiguousarray(array)), make_work, prefill)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("window", [None, 4])
def test_it_agrees_with_the_torch_back_end(page_size: int, window: int | None) -> None:
    config = replace(CONFIG, sliding_window=window, sliding_layers=(True, False) if window else ())
    torch.manual_seed(0)
    shapes = {slot.name: slot.target.shape for slot in load_model_slots(config)}
    tensors = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    plain, fast = (Forward(load_model(config, tensors), page_size=page_size) for _ in range(2))
    fast.attention = triton_backend(config)
    for step in STEPS:
        expected, found = plain.step(step), fast.step(step)
        for row in step:
            torch.testing.assert_close(found[row], expected[row], atol=1e-4, rtol=1e-4)


@pytest.fixture
def turned_apart(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every layer that turns heads in a launch of its own."""
    apart, taken = SelfAttention._rotate_and_run, list[int]()

    def counted(layer: SelfAttention, *args: Any) -> torch.Tensor:
        taken.append(layer._spec.layer)
        return apart(layer, *args)

    monkeypatch.setattr(SelfAttention, "_rotate_and_run", counted)
    return taken


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_few_decodes_in_half_precision_begin_with_the_projection(
    page_size: int, qk_norm: bool, turned_apart: list[int]
) -> None:
    """They are near what float32 gives, and the heads are never turned in a step of their own."""
    config = replace(CONFIG, sliding_window=4, sliding_layers=(True, False), qk_norm=qk_norm)
    torch.manual_seed(0)
    shapes = {slot.name: slot.target.shape for slot in load_model_slots(config)}
    tensors = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    half = load_model(config, tensors, dtype=torch.float16)
    plain, fast = Forward(load_model(config, tensors), page_size), Forward(half, page_size, dtype=torch.float16)
    fast.attention = triton_backend(config)
    for step in STEPS:
        expected = plain.step(step)
        turned_apart.clear()
        found = fast.step(step)
        assert turned_apart == ([0, 1] if any(len(new) > 1 for new in step.values()) else [])
        for row in step:
            error = float((found[row].float() - expected[row]).norm() / expected[row].norm())
            assert error < 5e-3


@pytest.mark.parametrize(
    ("dtype", "cache", "apart"),
    [
        (torch.float16, torch.float16, False),
        (torch.float32, torch.float32, True),
        (torch.float16, torch.bfloat16, True),
        (torch.float16, torch.float8_e4m3fn, True),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_what_has_no_kernel_from_the_projection_is_turned_apart(
    dtype: torch.dtype, cache: torch.dtype, apart: bool, split: bool, turned_apart: list[int]
) -> None:
    forward = Forward(build_model(CONFIG, Topology(), dtype, torch.device("cpu")), dtype=cache)
    for slot in forward.model.slots():
        slot.target.zero_()
    backend = triton_backend(CONFIG)
    forward.attention = SplitAttention(prefill=triton_backend(CONFIG), decode=backend) if split else backend
    forward.step({0: [1, 2, 3]})
    turned_apart.clear()
    forward.step({0: [4]})
    assert turned_apart == ([0, 1] if apart else [])
    forward.step({0: [5], 1: [6, 7]})
    assert turned_apart[-2:] == [0, 1]


@pytest.mark.parametrize(("dtype", "near"), [(torch.float8_e4m3fn, 0.05), (torch.float8_e5m2, 0.1)])
def test_an_8_bit_pool_costs_some_accuracy_and_nothing_else(dtype: torch.dtype, near: float) -> None:
    torch.manual_seed(0)
    shapes = {slot.name: slot.target.shape for slot in load_model_slots(CONFIG)}
    model = load_model(CONFIG, {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()})
    plain, small = Forward(model), Forward(model, dtype=dtype, scales=[(0.02, 0.01), (0.03, 0.005)])
    small.attention = triton_backend(CONFIG)
    for step in STEPS:
        fresh = {row for row in step if small.lengths[row] == 0}
        expected, found = plain.step(step), small.step(step)
        for row in step:
            error = float((found[row] - expected[row]).norm() / expected[row].norm())
            assert error < (1e-5 if row in fresh else near)
            assert row in fresh or error > 1e-5, "only fresh tokens are read as they are"


def load_model_slots(config: ModelConfig) -> Iterator[WeightSlot]:
    return build_model(config, Topology(), torch.float32, torch.device("cpu")).slots()
