"""Experts on tapes against plain torch: every way to choose them, every format of weights, alone and in company."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bough.core.model_config import MoEConfig
from bough.executor.native_recorder import Recorder, Recording
from bough.kernels.activation.reference import gated_mul
from bough.kernels.experts.reference import experts as plain_experts
from bough.kernels.lora.reference import PackedStack, to_tiles
from bough.kernels.ops import PackedExpertWeights, Router, add_gated
from bough.kernels.quant_linear.packed import FillingWeight, PackedWeight, aligned_bytes
from bough.kernels.routing.reference import route
from bough.loader.source import float_rows
from bough.native.tape import Step, ThreadPool
from tests.kernels.references.quant_linear import quant_linear

HIDDEN, INNER = 64, 32
MOE = MoEConfig(experts=12, per_token=3, intermediate_size=INNER)
ROUTINGS = {
    "softmax": MOE,
    "as they are": replace(MOE, renormalise=False, scale=2.5),
    "sigmoid": replace(MOE, scores="sigmoid", scale=1.5),
    "corrected": replace(MOE, scores="sigmoid", correction_bias=True),
    "groups": replace(MOE, groups=4, top_groups=2),
    "groups by two": replace(
        MOE, scores="sigmoid", groups=3, top_groups=2, group_score="best_two", correction_bias=True
    ),
    "one": replace(MOE, per_token=1, renormalise=False),
    "all": replace(MOE, experts=3),
    "many": replace(MOE, experts=130, per_token=8),
    "simulated": replace(MOE, simulate="uniform", scale=3.0),
    "sparse mixer": replace(MOE, scores="sparsemixer", jitter=0.2, scale=1.5),
    "biased": replace(MOE, biases=True, clamped_gate=(1.702, 0.7)),
}


class Layer:
    """Random experts, packed and plain."""

    def __init__(self, moe: MoEConfig, quantization: str = "none", stored: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw) * 0.5

        self.moe = moe
        self.router, self.router_bias = random(moe.experts, HIDDEN), random(moe.experts) if moe.biases else None
        self.correction = random(moe.experts) if moe.correction_bias else None
        self.gate_up = random(moe.experts, 2 * INNER, HIDDEN).to(stored)
        self.down = random(moe.experts, HIDDEN, INNER).to(stored)
        biases = [random(moe.experts, size) if moe.biases else None for size in (2 * INNER, HIDDEN)]
        self.gate_up_bias, self.down_bias = biases
        matrices = [part for pair, down in zip(self.gate_up, self.down, strict=True) for part in (*pair.chunk(2), down)]
        self.packed = [pack(matrix, quantization) for matrix in matrices]

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        ids, weights = self.routes(x)
        biases = (self.gate_up_bias, self.down_bias, self.moe.clamped_gate)
        return plain_experts(x, self.gate_up.float(), self.down.float(), ids, weights, "silu", *biases)

    def routes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route(torch.nn.functional.linear(x, self.router, self.router_bias), self.moe, self.correction)

    def run(
        self,
        library: ctypes.CDLL,
        x: torch.Tensor,
        threads: int = 1,
        adapters: Sequence[PackedStack] = (),
        slots: list[int] | None = None,
    ) -> torch.Tensor:
        recorder = Recorder(tokens=len(x), logits=1)
        entry = recorder.rows(HIDDEN, on_logits=False)
        experts = PackedExpertWeights(self.packed, self.gate_up_bias, self.down_bias, adapters)
        router = Router(self.router, self.correction, self.router_bias)
        result = recorder.ops.packed_experts(entry, router, self.moe, experts, "silu")
        return run(library, recorder, entry, result, x, threads, slots)


def pack(matrix: torch.Tensor, quantization: str) -> PackedWeight:
    weight = FillingWeight(*matrix.shape, quantization)
    weight.store(0, *float_rows(matrix))
    return weight.weight


def run(
    library: ctypes.CDLL,
    recorder: Recorder,
    entry: torch.Tensor,
    result: torch.Tensor,
    x: torch.Tensor,
    threads: int,
    slots: list[int] | None = None,
) -> torch.Tensor:
    recorded, pool = recorder.finish(library, entry, result), ThreadPool(library, threads)
    assert recorded.input is not None
    recorded.input[:] = x
    scratch = aligned_bytes(recorded.tape.scratch_bytes(len(x), threads))
    scratch[:] = 0xFF  # what nobody wrote is no number
    own = np.array(slots or [], dtype=np.int64)
    adapters = own.ctypes.data if len(own) else None
    pool.run(recorded.tape, Step(tokens=len(x), adapters=adapters), scratch.ctypes.data)
    return recorded.result.clone()


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_way_to_choose(any_tier: ctypes.CDLL, name: str) -> None:
    layer, x = Layer(ROUTINGS[name]), tokens(33)
    torch.testing.assert_close(layer.run(any_tier, x), layer.expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 40, 700])
def test_threads_share_the_work(library: ctypes.CDLL, count: int, threads: int) -> None:
    layer, x = Layer(ROUTINGS["many"]), tokens(count)
    torch.testing.assert_close(layer.run(library, x, threads), layer.expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("count", [3, 200])
def test_weights_of_sixteen_bits(any_tier: ctypes.CDLL, dtype: torch.dtype, count: int) -> None:
    """Of 200 tokens each expert gets enough that its tiles are made wider once."""
    layer, x = Layer(MOE, "auto", dtype), tokens(count)
    torch.testing.assert_close(layer.run(any_tier, x, threads=2), layer.expected(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights(any_tier: ctypes.CDLL, quantization: str) -> None:
    """Token by token, with the products of the reference."""
    layer, x = Layer(MOE, quantization), tokens(9)
    ids, weights = layer.routes(x)
    expected = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            gate, up, down = layer.packed[3 * expert : 3 * expert + 3]
            inner = gated_mul(quant_linear(x[token : token + 1], [gate, up]), "silu")
            expected[token] += weight * quant_linear(inner, [down])[0]
    found = layer.run(any_tier, x, threads=2)
    # An inner number that is rounded the other way to 8 bits is a step of 1/127 of its group's largest.
    assert (found - expected).norm() / expected.norm() < 2e-3


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_a_token_has_the_same_result_in_any_company(any_tier: ctypes.CDLL, quantization: str) -> None:
    layer, x = Layer(MOE, quantization), tokens(600)
    together = layer.run(any_tier, x, threads=2)
    for token in (0, 17, 599):
        assert torch.equal(layer.run(any_tier, x[token : token + 1])[0], together[token])


def test_adapters_have_the_same_result_in_any_company(any_tier: ctypes.CDLL) -> None:
    """Without one, that of experts without any; the third slot changes nothing."""
    layer, x, draw = Layer(MOE, "int4"), tokens(600), torch.Generator().manual_seed(3)
    held, stacks = [], []
    for experts, inputs, outputs in ((12, HIDDEN, (INNER, INNER)), (12, INNER, (HIDDEN,)), (1, HIDDEN, (12,))):
        thin = np.zeros((3, experts, len(outputs), 3), np.int64)
        for slot, expert, matrix in np.ndindex(2, experts, len(outputs)):
            rank = 3 + 20 * slot + expert % 2
            shapes = (rank, inputs), (outputs[matrix], rank)
            held.append([to_tiles(torch.randn(shape, generator=draw) * 0.2) for shape in shapes])
            thin[slot, expert, matrix] = *(tiles.data_ptr() for tiles in held[-1]), rank
        stacks.append(PackedStack(thin, inputs, np.cumsum([0, *outputs])))
    slots: list[int] = torch.randint(0, 4, (600,), generator=draw).tolist()
    together, plain = layer.run(any_tier, x, 2, stacks, slots), layer.run(any_tier, x)
    for token in range(0, 600, 23):
        alone = layer.run(any_tier, x[token : token + 1], 1, stacks, slots[token : token + 1])[0]
        assert torch.equal(alone, together[token])
        assert torch.equal(alone, plain[token]) == (slots[token] in (0, 3))


def test_what_is_no_number_shows_in_its_token_alone(any_tier: ctypes.CDLL) -> None:
    layer, x = Layer(MOE, "int8"), tokens(5)
    x[2, 7] = torch.nan
    bad = layer.run(any_tier, x).isnan().any(dim=1)
    assert bad.tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_added(any_tier: ctypes.CDLL, gated: bool) -> None:
    x, gate = tokens(5), tokens(1, seed=2) * 0.2 if gated else None
    recorder = Recorder(tokens=5, logits=1)
    entry = recorder.rows(HIDDEN, on_logits=False)
    with Recording(recorder):
        logits = None if gate is None else F.linear(entry, gate)
    result = recorder.ops.add_gated(entry, entry, logits)
    expected = add_gated(x, x, None if gate is None else F.linear(x, gate))
    torch.testing.assert_close(run(any_tier, recorder, entry, result, x, 2), expected)


def test_simulated_experts_are_those_of_the_reference(library: ctypes.CDLL) -> None:
    """Every token goes to other experts, whatever the router says."""
    layer, x = Layer(replace(MOE, experts=60, per_token=4, simulate="uniform")), tokens(300)
    ids, _ = layer.routes(x)
    counts: Any = np.bincount(ids.flatten().numpy(), minlength=60)
    assert counts.min() > 0
    torch.testing.assert_close(layer.run(library, x), layer.expected(x), rtol=1e-4, atol=1e-4)
