"""A layer's weight with adapters over it: rows that were quantised for it, and memory for a larger rank."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from bough.attention.context import ForwardContext
from bough.core.model_config import MoEConfig
from bough.distributed.topology import Topology
from bough.executor.adapters import adapter_rows
from bough.kernels.lora.reference import AdapterRows
from bough.kernels.ops import REFERENCE
from bough.kernels.quantize_rows.reference import QuantizedRows, quantize_rows
from bough.layers.adapters import AdapterSlots
from bough.layers.schemes.base import Part
from tests.fakes.placements import placed

NONE: Any = None


class Nothing:
    """A weight whose product is zero."""

    def __init__(self, *args: object) -> None: ...

    def linear(self, x: torch.Tensor | QuantizedRows, ctx: ForwardContext) -> torch.Tensor:
        return torch.zeros(len(x if isinstance(x, torch.Tensor) else x.values), 5)

    def slots(self, prefix: str) -> list[None]:
        return []


def test_slots_keep_what_they_hold_when_they_grow_and_rows_may_be_quantised() -> None:
    slots = AdapterSlots(2)
    nothing: Any = Nothing
    make: Any = slots.over(nothing, nothing, nothing)[0]
    parts = [Part("a", 3, (slice(0, 3),)), Part("b", 2, (slice(0, 2),))]
    weight = make(8, parts, False, placed(Topology(), torch.float32, torch.device("cpu")))
    assert list(weight.slots("layer.")) == []
    assert slots.shapes() == {"layer.a": (3, 8), "layer.b": (2, 8)}
    torch.manual_seed(0)
    small, large = (torch.randn(4, 8), torch.randn(3, 4)), (torch.randn(20, 8), torch.randn(2, 20))
    slots.reserve(4)
    slots.place(2, {"layer.a": small})
    slots.reserve(20)
    assert slots.rank == 32
    slots.place(1, {"layer.b": large})
    rows: AdapterRows | None = adapter_rows(np.array([2, 0, 1]), np.array([2]))
    ctx, x = ForwardContext(NONE, NONE, NONE, adapters=rows), torch.randn(3, 8)
    for given, near in ((x, 1e-5), (quantize_rows(x), 0.2)):
        product = weight.linear(given, ctx)
        assert product[0, :3] == pytest.approx(small[1] @ small[0] @ x[0], rel=near, abs=10 * near)
        assert product[2, 3:] == pytest.approx(large[1] @ large[0] @ x[2], rel=near, abs=10 * near)
        assert not product[0, 3:].any() and not product[1].any() and not product[2, :3].any()


def test_a_matrix_whose_results_are_keys_and_values_is_changed_for_both() -> None:
    slots, nothing = AdapterSlots(2), cast(Any, Nothing)
    make: Any = slots.over(nothing, nothing, nothing)[0]
    parts = [Part("q", 1, (slice(0, 1),)), *[Part("k", 2, (slice(0, 2),))] * 2]
    weight = make(8, parts, False, placed(Topology(), torch.float32, torch.device("cpu")))
    assert list(weight.slots("layer.")) == [] and slots.shapes() == {"layer.q": (1, 8), "layer.k": (2, 8)}
    torch.manual_seed(0)
    down, up, x = torch.randn(4, 8), torch.randn(2, 4), torch.randn(3, 8)
    slots.reserve(4)
    slots.place(2, {"layer.k": (down, up)})
    ctx = ForwardContext(NONE, NONE, NONE, adapters=adapter_rows(np.array([2, 0, 2]), np.array([2])))
    expected = x @ down.T @ up.T
    expected[1] = 0
    torch.testing.assert_close(weight.linear(x, ctx), torch.cat((torch.zeros(3, 1), expected, expected), dim=1))


def test_experts_beside_an_mlp_are_changed_by_kernels_as_by_torch() -> None:
    """Their router's logits are given, and each expert's weight is scaled."""
    pytest.importorskip("triton")
    from bough.kernels.triton_ops import TRITON

    moe, found = MoEConfig(experts=5, per_token=2, intermediate_size=24, beside_mlp=True), []
    draw = torch.Generator().manual_seed(0)
    x, logits, scale = (torch.randn(*size, generator=draw) for size in ((6, 32), (6, 5), (5,)))
    weights = [torch.randn(*size, generator=draw) * 0.2 for size in ((5, 48, 32), (5, 32, 24))]
    changes = {
        f"mlp.experts.{part}_proj": (
            torch.randn(5, 4, inputs, generator=draw),
            torch.randn(5, outputs, 4, generator=draw),
        )
        for part, outputs, inputs in (("gate", 24, 32), ("up", 24, 32), ("down", 32, 24))
    }
    for ops in (REFERENCE, TRITON):
        slots, placement = AdapterSlots(2), placed(Topology(), torch.float32, torch.device("cpu"), ops=ops)
        make = slots.over(placement.make_weight, placement.make_table, placement.make_experts)[2]
        experts: Any = make(32, moe, placement)
        for slot in experts.slots("mlp.experts."):
            _, _, number, part, _ = slot.name.split(".")
            rows = {"gate_proj": slice(24), "up_proj": slice(24, None), "down_proj": slice(None)}[part]
            slot.target.copy_(weights[part == "down_proj"][int(number), rows])
        slots.reserve(4, list(changes))
        slots.place(1, changes)
        ctx = ForwardContext(NONE, NONE, NONE, adapters=adapter_rows(np.array([1, 0, 1, 1, 0, 0]), np.array([5])))
        plain = ForwardContext(NONE, NONE, NONE)
        found.append([experts.by_logits(x, logits, scale, "silu", each) for each in (ctx, plain)])
    for own, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)
    changed = (found[0][0] - found[0][1]).abs().amax(dim=1) > 1e-3
    assert changed.tolist() == [True, False, True, True, False, False]
