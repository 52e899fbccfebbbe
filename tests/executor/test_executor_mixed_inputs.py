"""A step in the padded buffers of a captured graph gives what the same step gives by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from bough.attention.context import ForwardContext, MediaRows
from bough.attention.triton_backend import TritonAttention
from bough.core.model_config import ModelConfig, RopeConfig
from bough.core.plan import BatchPlan, Limits, RowSetup
from bough.core.sampling_params import SamplingParams
from bough.distributed.topology import Topology
from bough.executor.cuda_inputs import CudaInputs, MixedInputs
from bough.executor.layout import sampled_tokens
from bough.kernels.decode_attention.work import DecodeWork
from bough.kernels.prefill_attention.triton import config_for
from bough.memory.pools.kv_pool import KVPool
from bough.models.base import CausalLM
from bough.models.registry import build_model
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
    context_length=64,
    norm_eps=1e-5,
    rope=RopeConfig(10000.0),
    tied_embeddings=True,
)
CPU = torch.device("cpu")
LIMITS = Limits(4, 1, (100,), 64, 60, 32, "")
NONE = np.zeros(0, dtype=np.int32)


class Copies:
    """Stands for `Staging` where host and device are one."""

    def to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    def copy_into(self, target: torch.Tensor, array: npt.NDArray[Any]) -> None:
        target.copy_(torch.from_numpy(array.ravel().copy()))


class Device:
    """One model with rows and a cache of its own."""

    def __init__(self, model: CausalLM, axes: int = 1, media: MediaRows | None = None) -> None:
        prefill = config_for(4, 2, 16, torch.float32)
        staging: Any = Copies()
        self.model, self.pool = model, KVPool(CONFIG, (100,), 1, torch.float32, CPU, Topology())
        self.inputs = CudaInputs(LIMITS, CPU, staging)
        rows = self.inputs.page_tables, self.inputs.last_tokens
        self.mixed = MixedInputs(LIMITS, prefill.block_queries, *rows, staging, axes, media)
        self.attention = TritonAttention(
            staging.to_device,
            lambda layer: DecodeWork(4, 4, 2, 16, CPU, window=layer.window, programs=INTERPRETED_PROGRAMS),
            prefill,
        )

    @torch.inference_mode()
    def run_padding(self, size: int) -> None:
        self.mixed.pad(size)
        ids, batch, indices, media = self.mixed.take(size)
        self.attention.prepare(batch)
        self.model.forward(ids, ForwardContext(self.attention, self.pool, batch, indices, media=media))

    @torch.inference_mode()
    def run(self, plan: BatchPlan, size: int | None, media: MediaRows | None = None) -> torch.Tensor:
        """Hidden states of the tokens that sample; padded to `size` if there is one."""
        layout = self.inputs.lay_out(plan, self.inputs.apply(plan))
        if size is None:
            ids, batch = self.inputs.mixed_batch(layout)
            indices = torch.from_numpy(sampled_tokens(plan, layout.query_starts))
        else:
            self.mixed.send(plan, layout, size, media)
            ids, batch, indices, media = self.mixed.take(size)
        self.attention.prepare(batch)
        hidden = self.model.forward(ids, ForwardContext(self.attention, self.pool, batch, indices, media=media))
        count = int(plan.sample.sum())
        rows = torch.from_numpy(plan.rows[plan.sample].astype(np.int64))
        self.inputs.advance(rows, self.model.logits(hidden[:count]).argmax(dim=-1))
        return hidden[:count]


def plan(step: int, decodes: list[int], prompts: dict[int, tuple[list[int], bool, bool]], first_page: int) -> BatchPlan:
    """Rows that decode, and rows that get tokens: (tokens, whether the row begins, whether it samples)."""
    setups = tuple(
        RowSetup(row, SamplingParams(), 0, (NONE,), 0, 0, None, len(tokens), None, ())
        for row, (tokens, begins, _) in prompts.items()
        if begins
    )
    lens = np.array([1] * len(decodes) + [len(tokens) for tokens, *_ in prompts.values()], dtype=np.int32)
    given = np.array([0] * len(decodes) + [len(tokens) for tokens, *_ in prompts.values()], dtype=np.int32)
    return BatchPlan(
        step=step,
        setups=setups,
        edits=(),
        rows=np.array([*decodes, *prompts], dtype=np.int32),
        query_lens=lens,
        given=given,
        tokens=np.array([t for tokens, *_ in prompts.values() for t in tokens], dtype=np.int32),
        new_pages=(np.arange(first_page, first_page + int(lens.sum()), dtype=np.int32),),
        new_page_counts=(lens,),
        sample=np.array([True] * len(decodes) + [samples for *_, samples in prompts.values()]),
    )


STEPS = [
    plan(0, [], {0: ([1, 2, 3, 4, 5], True, True), 2: ([9, 8], True, True)}, 1),
    plan(1, [2, 0], {1: ([7, 7, 6, 5, 4, 3, 2, 1, 0], True, False)}, 8),
    plan(2, [0], {1: ([11, 12], False, True), 3: ([3], True, True)}, 19),
    plan(3, [], {2: ([5, 6, 7], False, False)}, 23),
]


def some_model(config: ModelConfig = CONFIG) -> CausalLM:
    torch.manual_seed(0)
    model = build_model(config, Topology(), torch.float32, CPU)
    for slot in model.slots():
        slot.target.copy_(torch.randn(slot.target.shape) * 0.3)
    return model


@pytest.mark.parametrize("padding", [0, 13])
def test_padding_changes_nothing(padding: int) -> None:
    model = some_model()
    plain, padded = Device(model), Device(model)
    for step in STEPS:
        expected = plain.run(step, None)
        padded.mixed.pad(int(step.query_lens.sum()) + padding)
        found = padded.run(step, int(step.query_lens.sum()) + padding)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(padded.inputs.last_tokens, plain.inputs.last_tokens)


def test_media_and_positions_on_three_axes_stand_in_buffers() -> None:
    """A step with an image, one without beside a decode, and a larger one: what a step leaves is not taken again."""
    model = some_model(replace(CONFIG, rope=RopeConfig(10000.0, sections=(2, 3, 3))))
    room = MediaRows(torch.zeros(32, 1, dtype=torch.bool), torch.full((2, 32, 32), float("nan")))
    plain, padded = Device(model), Device(model, 3, room)
    steps = [
        plan(0, [], {0: ([1, 2, 3, 4, 5], True, True), 2: ([9, 8], True, True)}, 1),
        plan(1, [2, 0], {1: ([7, 7, 6, 5, 4, 3, 2, 1, 0], True, False)}, 8),
        plan(2, [0], {1: ([11, 12], False, True), 3: ([3, 4, 5, 6, 7, 8, 9], True, True)}, 19),
    ]
    seen = {0: slice(1, 4), 2: slice(5, 9)}
    for number, step in enumerate(steps):
        tokens, media = int(step.query_lens.sum()), None
        if number in seen:
            media = MediaRows(torch.zeros(tokens, 1, dtype=torch.bool), torch.randn(2, tokens, 32))
            media.here[seen[number]] = True
            positions = np.random.default_rng(number).integers(0, 40, (3, len(step.tokens)), dtype=np.int32)
            runs = np.array([[seen[number].start, 0, 0, 1]], dtype=np.int32)
            step = replace(step, positions=positions, media=runs)
        expected = plain.run(step, None, media)
        torch.testing.assert_close(padded.run(step, tokens + 13, media), expected, atol=1e-5, rtol=1e-5)


def test_padding_of_any_size_leaves_the_cache_alone_after_any_other() -> None:
    device = Device(some_model())
    device.run(plan(0, [], {0: (list(range(1, 24)), True, True)}, 1), 24)
    layers = [*device.pool.keys, *device.pool.values]
    before = [layer[1:24].clone() for layer in layers]
    for size in (20, 24, 36, 8, 24):
        device.run_padding(size)
        assert all(torch.equal(layer[1:24], kept) for layer, kept in zip(layers, before, strict=True))
