"""Routing and expert products in Triton against plain torch, for each way that they are cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from bough.core.model_config import MoEConfig
from bough.distributed.experts import balanced
from bough.distributed.group import ALONE
from bough.distributed.topology import Topology
from bough.kernels.activation.reference import gated_mul
from bough.kernels.experts import fp4, reference
from bough.kernels.experts import triton as fast
from bough.kernels.experts.triton import Cut, Tiling, config_for
from bough.kernels.invariant_ops import INVARIANT
from bough.kernels.lora.reference import AdapterStack, PairAdapters, tiles_of
from bough.kernels.ops import REFERENCE, ExpertMatrices, Experts, Norm, NormedSum, Ops, Router
from bough.kernels.quantize_rows import reference as quantizing
from bough.kernels.quantize_rows.reference import QuantizedRows
from bough.kernels.rms_norm.reference import rms_norm
from bough.kernels.routing import reference as plain_routing
from bough.kernels.routing.triton import Routed, counters, most_tiles, norm_route, put_in_order, route
from bough.kernels.triton_ops import TRITON
from bough.kernels.w4_linear.reference import IntegerRows, W4Rows, pack, quantize
from bough.layers.spread import LayerExperts, SpreadOptions
from tests.kernels.closeness import assert_near

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

MOE = MoEConfig(experts=12, per_token=3, intermediate_size=40)
CUTS = [
    Tiling(16, True, False, Cut(32, 32, 4, 2), Cut(16, 32, 4, 2)),
    Tiling(16, False, False, Cut(32, 32, 4, 2), Cut(64, 64, 4, 2)),
    Tiling(32, False, True, Cut(64, 16, 4, 2), Cut(32, 32, 4, 2)),
]
ROUTINGS = [
    MOE,
    replace(MOE, renormalise=False, scale=2.5),
    replace(MOE, scores="sigmoid", correction_bias=True, scale=1.5),
    replace(MOE, groups=4, top_groups=2),
    replace(MOE, scores="sigmoid", groups=3, top_groups=2, group_score="best_two", correction_bias=True),
    replace(MOE, per_token=1),
    replace(MOE, appended=2, scale=2.5),
    replace(MOE, experts=64, per_token=8),
    replace(MOE, simulate="uniform", scale=3.0),
    replace(MOE, experts=60, per_token=4, simulate="uniform"),
    replace(MOE, per_token=2, scores="sparsemixer", jitter=0.1),
    replace(MOE, per_token=3, scores="sparsemixer", jitter=0.01, scale=2.0),
]


@pytest.mark.parametrize("moe", ROUTINGS)
def test_each_token_gets_the_same_experts_and_weights(moe: MoEConfig, device: torch.device) -> None:
    torch.manual_seed(0)
    # No two of a token are equal, even in bfloat16: those might be chosen in another order.
    logits = torch.stack([torch.randperm(moe.experts) for _ in range(5)]).to(device, torch.bfloat16) / 8
    bias = torch.randn(moe.experts, device=device) * 0.3 if moe.correction_bias else None
    ids, weights = plain_routing.route(logits, moe, bias)
    got = route(logits, moe, bias, count=False)
    torch.testing.assert_close(_by_expert(got.ids, got.weights, moe), _by_expert(ids, weights, moe))


@pytest.mark.parametrize("moe", [replace(MOE, biases=True), ROUTINGS[4], ROUTINGS[6], ROUTINGS[10]])
@pytest.mark.parametrize("rows", [3, 21])
@pytest.mark.parametrize("added", [False, True])
def test_norm_router_and_choice_in_one_launch(moe: MoEConfig, rows: int, added: bool, device: torch.device) -> None:
    torch.manual_seed(3)
    x, router = torch.randn(rows, 72, device=device), torch.randn(moe.experts, 72, device=device)
    residual = torch.randn(rows, 72, device=device) if added else None
    norm = Norm(torch.randn(72, device=device), 1e-6, True)
    bias = torch.randn(moe.experts, device=device) * 0.3 if moe.correction_bias else None
    logit_bias = torch.randn(moe.experts, device=device) if moe.biases else None
    routed, normed, stream = norm_route(x, residual, norm, Router(router, bias, logit_bias), moe, count=rows > 16)
    if rows > 16:
        assert routed.ranks is not None
        assert counters(device)[: moe.experts + moe.appended].tolist() == torch.bincount(routed.ids.flatten()).tolist()
        with torch.inference_mode():  # in which another test may have made them
            counters(device).zero_()
    expected, total = rms_norm(x, norm.weight, norm.eps, residual, norm.plus_one)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(stream, total)
    ids, weights = plain_routing.route(F.linear(expected, router, logit_bias), moe, bias)
    got = _by_expert(routed.ids, routed.weights, moe)
    torch.testing.assert_close(got, _by_expert(ids, weights, moe), atol=1e-5, rtol=1e-4)


def _by_expert(ids: torch.Tensor, weights: torch.Tensor, moe: MoEConfig) -> torch.Tensor:
    """[tokens, experts + appended]: equal scores may stand in another order."""
    return torch.zeros(len(ids), moe.experts + moe.appended, device=ids.device).scatter_(1, ids.long(), weights)


@pytest.mark.parametrize("ops", [REFERENCE, TRITON, INVARIANT])
def test_experts_are_chosen_by_logits_that_are_not_rounded(ops: Ops, device: torch.device) -> None:
    """1024 and 1024.25 are one number in float16."""
    x = torch.zeros(3, 32, dtype=torch.float16, device=device)
    x[:, 0], x[:, 1] = 1024.0, 1.0
    router = torch.zeros(4, 32, dtype=torch.float16, device=device)
    router[:3, 0], router[1, 1] = 1.0, 0.25
    logits = ops.router_logits(x, router)
    torch.testing.assert_close(logits, x.float() @ router.float().T)
    gate_up = torch.ones(4, 32, 32, dtype=torch.float16, device=device) / 1024
    down = torch.arange(4, device=device).half().view(4, 1, 1).expand(4, 32, 16).contiguous()
    moe = MoEConfig(experts=4, per_token=1, intermediate_size=16)
    found = ops.routed_experts(x, Router(router), Experts(moe, ExpertMatrices(gate_up, down), "silu"))
    one = reference.experts(
        x, gate_up, down, torch.ones(3, 1, dtype=torch.int32, device=device), torch.ones(3, 1, device=device), "silu"
    )
    assert one.abs().min() > 0
    torch.testing.assert_close(found, one, atol=0.1, rtol=0.05)


@pytest.fixture
def nothing_is_zero() -> Iterator[None]:
    """Memory that was not written holds no numbers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nothing_is_zero")
@pytest.mark.filterwarnings("ignore:All-NaN")  # rows of other ranks' pairs are quantised, and not looked at
@pytest.mark.parametrize(
    ("ops", "kind", "tokens"),
    [
        *((TRITON, "plain", tokens) for tokens in (1, 9, 40)),
        *((TRITON, "fp8", 20), (TRITON, "w4", 9), (INVARIANT, "plain", 9)),
        pytest.param(TRITON, "fp8", 1, marks=pytest.mark.long),
    ],
)
def test_ranks_with_some_of_the_experts_add_up(ops: Ops, kind: str, tokens: int, device: torch.device) -> None:
    """With a second copy of some, whose tokens are split."""
    torch.manual_seed(5)
    x, norm = torch.randn(tokens, 128, device=device), Norm(torch.ones(128, device=device), 1e-6, False)
    router = Router(torch.randn(12, 128, device=device))
    gate_up, down = torch.randn(12, 128, 128, device=device) / 8, torch.randn(12, 128, 64, device=device) / 8
    biases = torch.randn(12, 128, device=device), torch.randn(12, 128, device=device)

    def kept(matrices: torch.Tensor) -> reference.Matrices:
        if kind == "fp8":
            return QuantizedRows(
                *(torch.stack(part) for part in zip(*map(quantizing.quantize_rows, matrices), strict=True))
            )
        if kind == "w4":
            packed = [pack(quantize(matrix, 32)) for matrix in matrices]
            return W4Rows(*(torch.stack(part) for part in zip(*packed, strict=True)))
        return matrices

    whole = ExpertMatrices(kept(gate_up), kept(down), *(biases if kind == "plain" else ()))
    normed = rms_norm(x, norm.weight, norm.eps, None, False)[0]
    expected = ops.normed_experts(NormedSum(x, None, norm), router, Experts(MOE, whole, "silu"))[0]
    found, options = torch.zeros_like(x), SpreadOptions(redundant=4, count=True)
    for rank in range(2):
        here = LayerExperts(12, Topology(rank, 2, 2), device, options, ALONE)
        here.place(balanced([9.0, *range(11)], here.slots, 2))
        held = torch.tensor(here.held, device=device)

        some = [
            part[held] if isinstance(part, torch.Tensor) else part and type(part)(*(each[held] for each in part))
            for part in whole[:4]
        ]
        matrices = ExpertMatrices(*some, None, here.spread)  # type: ignore[arg-type]
        found += ops.normed_experts(NormedSum(x, None, norm), router, Experts(MOE, matrices, "silu"))[0]
        ids = plain_routing.route(ops.router_logits(normed, router.weight), MOE, None)[0]
        assert here.loads.tolist() == torch.bincount(ids.flatten(), minlength=12).tolist()
    assert not counters(device).any()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("nothing_is_zero")
@pytest.mark.parametrize("tokens", [2, 40])
@pytest.mark.parametrize("ops", [REFERENCE, TRITON])
def test_tokens_may_be_sent_to_their_experts(ops: Ops, tokens: int, device: torch.device) -> None:
    """What comes from other ranks has places, not experts."""
    torch.manual_seed(6)
    x, router = torch.randn(tokens, 64, device=device), Router(torch.randn(12, 64, device=device))
    gate_up, down = torch.randn(12, 64, 64, device=device) / 8, torch.randn(12, 64, 32, device=device) / 8
    expected = REFERENCE.routed_experts(x, router, Experts(MOE, ExpertMatrices(gate_up, down), "silu"))
    found = torch.zeros_like(x)
    for rank in range(2):
        here = LayerExperts(12, Topology(rank, 2, 2), device, SpreadOptions(4, all_to_all=True), ALONE)
        held, width = list(here.held), len(here.held)

        def to_this_one(
            rows: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, multiply: reference.Multiply
        ) -> torch.Tensor:
            own = torch.where(slots // width == rank, slots % width, -1)  # noqa: B023
            back = multiply(rows.flip(0), own.flip(0), weights.flip(0))  # in another order
            return back.flip(0)

        assert here.spread is not None
        spread = here.spread._replace(dispatch=to_this_one)
        found += ops.routed_experts(
            x, router, Experts(MOE, ExpertMatrices(gate_up[held], down[held], spread=spread), "silu")
        )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_simulated_experts_are_drawn_evenly_and_never_twice() -> None:
    moe = replace(MOE, experts=128, per_token=8, simulate="uniform")
    ids, weights = plain_routing.route(torch.zeros(4096, 128), moe, None)
    assert all(len(set(row)) == 8 for row in ids.tolist())
    counts = torch.bincount(ids.flatten().long(), minlength=128)
    assert counts.min() > 200 and counts.max() < 320  # 256 on average
    assert weights.sum(1).allclose(torch.ones(4096))


@pytest.mark.parametrize("tile_rows", [4, 16])
def test_the_order_has_each_pair_once_among_those_of_its_expert(tile_rows: int, device: torch.device) -> None:
    torch.manual_seed(1)
    moe = replace(MOE, experts=40)
    routed = route(torch.randn(60, moe.experts, device=device) * 3, moe, None, count=True)
    order = put_in_order(routed, moe.experts, tile_rows)
    with torch.inference_mode():
        counters(device).zero_()
    experts = routed.ids.flatten().tolist()
    assert sorted(order.pairs.tolist()) == list(range(180))
    covered = []
    for expert, first, rows in order.tiles.tolist():
        assert 0 <= rows <= tile_rows
        pairs = order.pairs[first : first + rows].tolist()
        assert all(experts[pair] == expert for pair in pairs)
        covered += pairs
    assert sorted(covered) == list(range(180))
    assert len(order.tiles) == most_tiles(180, moe.experts, tile_rows)


@pytest.mark.parametrize(
    ("tokens", "config", "activation"),
    [
        (1, None, "silu"),
        (2, None, "gelu_tanh"),
        (5, CUTS[0], "silu"),
        (16, CUTS[1], "gelu_tanh"),
        (20, CUTS[2], "silu"),
        (1, None, "relu2"),  # without gates
        (5, CUTS[0], "relu2"),
        (20, CUTS[2], "relu2"),
        *(pytest.param(50, cut, "silu", marks=pytest.mark.long) for cut in CUTS),
    ],
)
def test_products_are_those_of_plain_torch(
    tokens: int, config: Tiling | None, activation: str, device: torch.device
) -> None:
    torch.manual_seed(2)
    x = torch.randn(tokens, 72, device=device)
    gate_up = torch.randn(MOE.experts, 40 if activation == "relu2" else 80, 72, device=device) / 8
    down = torch.randn(MOE.experts, 72, 40, device=device) / 6
    routed = route(torch.randn(tokens, MOE.experts, device=device), MOE, None, count=tokens > 16)
    got = fast.multiply(x, ExpertMatrices(gate_up, down), routed, activation, config=config)
    exact = reference.experts(
        x.double(), gate_up.double(), down.double(), routed.ids, routed.weights.double(), activation
    )
    assert_near(got, exact, 1e-5)
    assert not counters(device).any()  # as the next layer must find them


FEW = replace(MOE, experts=4, per_token=2)
WIDE, INNER = 160, 144  # no multiples of 128
SMALL_CUTS = [
    Tiling(16, True, False, Cut(64, 64, 4, 2), Cut(32, 128, 4, 2)),
    Tiling(16, True, False, Cut(64, 64, 4, 2), Cut(32, 128, 4, 2), small_rows=True),
    Tiling(32, False, True, Cut(64, 128, 4, 2), Cut(128, 64, 4, 2), small_rows=True),
]


def small_experts(
    group: int, device: torch.device, moe: MoEConfig = FEW, hidden: int = WIDE, inner: int = INNER
) -> tuple[QuantizedRows, QuantizedRows]:
    """Gate and up, and down, in 8 bits, whose scales differ from row to row and group to group."""

    def matrices(outputs: int, inputs: int) -> QuantizedRows:
        wide = torch.randn(moe.experts * outputs, inputs, device=device) * torch.rand(inputs, device=device)
        rows = quantizing.quantize_rows(wide / inputs**0.5 * 8, group)
        return QuantizedRows(*(part.view(moe.experts, outputs, -1) for part in rows))

    return matrices(2 * inner, hidden), matrices(hidden, inner)


def by_hand(x: torch.Tensor, gate_up: QuantizedRows, down: QuantizedRows, routed: Routed, group: int) -> torch.Tensor:
    """The experts' sum where rows are quantised before each product."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    rows = quantizing.quantize_rows(x, group).dequantize().double()
    for expert in set(routed.ids.flatten().tolist()):
        tokens, slots = torch.nonzero(routed.ids == expert, as_tuple=True)
        of_gate_up, of_down = (QuantizedRows(*(part[expert] for part in each)).dequantize() for each in (gate_up, down))
        inner = gated_mul((rows[tokens] @ of_gate_up.double().T).to(x.dtype), "silu")
        small = quantizing.quantize_rows(inner, group).dequantize().double()
        out.index_add_(0, tokens, small @ of_down.double().T * routed.weights[tokens, slots, None])
    return out


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize(
    ("tokens", "config"), [(1, None), (2, None), (5, SMALL_CUTS[0]), (17, SMALL_CUTS[1]), (17, SMALL_CUTS[2])]
)
def test_products_with_weights_of_8_bits(tokens: int, config: Tiling | None, group: int, device: torch.device) -> None:
    torch.manual_seed(5)
    x, (gate_up, down) = torch.randn(tokens, WIDE, device=device), small_experts(group, device)
    assert gate_up.group == down.group == group
    routed = route(torch.randn(tokens, FEW.experts, device=device), FEW, None, count=tokens > 16)
    got = fast.multiply(x, ExpertMatrices(gate_up, down), routed, "silu", config=config)
    if config is not None and config.small_rows:
        # A sum that lies in the middle between two numbers of 8 bits may become either.
        assert_near(got, by_hand(x, gate_up, down, routed, group), 2e-3, times=20)
    else:
        exact = reference.experts(x.double(), gate_up, down, routed.ids, routed.weights.double(), "silu")
        assert_near(got, exact, 1e-5)
    assert not counters(device).any()


@pytest.mark.parametrize("kind", ["plain", "adapted", "fp8", "fp8-groups", "int4"])
@pytest.mark.parametrize("tokens", [2, 20])
def test_experts_may_have_no_gates(tokens: int, kind: str, device: torch.device) -> None:
    torch.manual_seed(7)
    hidden, inner = 160, 96
    x, weights = torch.randn(tokens, hidden, device=device), list[reference.Matrices]()
    for outputs, inputs in ((inner, hidden), (hidden, inner)):
        wide = torch.randn(FEW.experts * outputs, inputs, device=device) / inputs**0.5 * 2
        if kind == "int4":
            parts = [part.view(FEW.experts, outputs, -1).to(device) for part in pack(quantize(wide.cpu(), 32))]
            weights.append(W4Rows(*parts))
        elif kind.startswith("fp8"):
            rows = quantizing.quantize_rows(wide, 128 if kind == "fp8-groups" else 0)
            weights.append(QuantizedRows(*(part.view(FEW.experts, outputs, -1) for part in rows)))
        else:
            weights.append(wide.view(FEW.experts, outputs, inputs))
    stacks = []
    for outputs, inputs in ((inner, hidden), (hidden, inner)) if kind == "adapted" else ():
        bands, ranks = (slice(0, outputs),), torch.full((1, 1), 8, dtype=torch.int32, device=device)
        thin = torch.randn(FEW.experts, 1, 16, inputs, device=device) / 8
        back, tiles = torch.randn(FEW.experts, outputs, 16, device=device) / 4, torch.from_numpy(tiles_of(bands))
        stacks.append(AdapterStack(thin, back, ranks, tiles.to(device), FEW.experts))
    adapted = PairAdapters(*stacks, torch.ones(tokens, dtype=torch.int32, device=device)) if stacks else None
    routed = route(torch.randn(tokens, FEW.experts, device=device), FEW, None, count=tokens > 16)
    got = fast.multiply(x, ExpertMatrices(*weights, adapted=adapted), routed, "relu2")
    choice = (routed.ids, routed.weights, "relu2")
    assert_near(got, reference.experts(x, *weights, *choice, adapted=adapted).double(), 1e-4)
    if kind == "plain":
        first, second = (matrix.double() for matrix in weights if isinstance(matrix, torch.Tensor))
        exact = torch.zeros_like(x, dtype=torch.float64)
        for token, slot in torch.cartesian_prod(torch.arange(tokens), torch.arange(2)).tolist():
            expert, weight = routed.ids[token, slot], routed.weights[token, slot].double()
            exact[token] += weight * (second[expert] @ F.relu(first[expert] @ x[token].double()).square())
        assert_near(got, exact, 1e-5)


def packed_experts(
    group: int, device: torch.device, moe: MoEConfig = FEW, hidden: int = WIDE, inner: int = INNER
) -> tuple[W4Rows, W4Rows]:
    """Gate and up, and down, in 4 bits."""

    def matrices(outputs: int, inputs: int) -> W4Rows:
        rows, groups = moe.experts * outputs, inputs // group
        packed = pack(
            IntegerRows(
                torch.randint(0, 16, (rows, inputs), dtype=torch.uint8),
                torch.rand(rows, groups) / inputs**0.5,
                torch.randint(0, 16, (rows, groups), dtype=torch.uint8),
            )
        )
        return W4Rows(*(part.view(moe.experts, outputs, -1).to(device) for part in packed))

    return matrices(2 * inner, hidden), matrices(hidden, inner)


@pytest.mark.parametrize(
    ("tokens", "sizes", "config"),
    [
        (2, (160, 96, 32), None),
        (5, (256, 128, 64), None),
        (17, (256, 128, 128), Tiling(16, False, False, Cut(32, 128, 4, 2), Cut(64, 128, 4, 2))),
    ],
)
def test_products_with_weights_of_4_bits(
    tokens: int, sizes: tuple[int, int, int], config: Tiling | None, device: torch.device
) -> None:
    torch.manual_seed(6)
    hidden, inner, group = sizes
    x, matrices = torch.randn(tokens, hidden, device=device), packed_experts(group, device, FEW, hidden, inner)
    routed = route(torch.randn(tokens, FEW.experts, device=device), FEW, None, count=tokens > 16)
    got = fast.multiply(x, ExpertMatrices(*matrices), routed, "silu", config=config)
    exact = reference.experts(x.double(), *matrices, routed.ids, routed.weights.double(), "silu")
    assert_near(got, exact, 1e-5)


@pytest.mark.parametrize(
    ("tokens", "config", "clamped_gate"),
    [
        (2, None, None),
        (1, None, (1.702, 0.7)),
        (3, CUTS[0], (1.702, 0.7)),
        (3, CUTS[1], None),
        pytest.param(20, CUTS[2], (1.702, 0.7), marks=pytest.mark.slow),
    ],
)
def test_experts_may_have_biases_and_a_clamped_gate(
    tokens: int, config: Tiling | None, clamped_gate: tuple[float, float] | None, device: torch.device
) -> None:
    torch.manual_seed(2)
    x = torch.randn(tokens, 72, device=device)
    shapes = ((12, 80, 72), (12, 72, 40), (12, 80), (12, 72))
    tensors = [torch.randn(shape, device=device) / 6 for shape in shapes]
    routed = route(torch.randn(tokens, MOE.experts, device=device), MOE, None, count=tokens > 16)
    got = fast.multiply(x, ExpertMatrices(*tensors, clamped_gate), routed, "silu", config=config)
    gate_up, down, *biases = (tensor.double() for tensor in tensors)
    choice = (routed.ids, routed.weights.double(), "silu")
    assert_near(got, reference.experts(x.double(), gate_up, down, *choice, *biases, clamped_gate), 1e-5)


@pytest.mark.parametrize("kind", ["plain", "biased", "fp8"])
@pytest.mark.parametrize("tokens", [1, 20])
def test_adapters_add_to_both_products_of_their_tokens_experts(tokens: int, kind: str, device: torch.device) -> None:
    """Against merged matrices, token by token; the second of two slots leaves up alone."""
    torch.manual_seed(3)
    x, (experts, hidden, inner) = torch.randn(tokens, 128, device=device), (MOE.experts, 128, 64)
    matrices = [torch.randn(experts, *shape, device=device) / 8 for shape in ((2 * inner, hidden), (hidden, inner))]
    biases = [torch.randn(experts, size, device=device) / 6 for size in (2 * inner, hidden)] if kind == "biased" else []
    kept: list[reference.Matrices] = [*matrices]
    if kind == "fp8":
        rows = [[quantizing.quantize_rows(each) for each in matrix] for matrix in matrices]
        kept = [QuantizedRows(*map(torch.stack, zip(*each, strict=True))) for each in rows]
        matrices = [torch.stack([quantized.dequantize() for quantized in each]) for each in rows]
    stacks, merged = [], [[matrix.double() for _ in range(3)] for matrix in matrices]
    for number, bands in enumerate(((slice(0, inner), slice(inner, 2 * inner)), (slice(0, hidden),))):
        inputs, ranks = (hidden, inner)[number], torch.tensor([[9, 16], [4, 0]], dtype=torch.int32)[:, : len(bands)]
        down = torch.randn(2 * experts, len(bands), 16, inputs, device=device) / 8
        up = torch.randn(2 * experts, bands[-1].stop, 16, device=device) / 4
        tiles = torch.from_numpy(tiles_of(bands)).to(device)
        stacks.append(AdapterStack(down, up, ranks.to(device), tiles, experts))
        for slot, of_slot in enumerate(ranks.tolist()):
            wide = merged[number][1 + slot] = merged[number][0].clone()
            for matrix, (band, rank) in enumerate(zip(bands, of_slot, strict=True)):
                own = slice(slot * experts, (slot + 1) * experts)
                wide[:, band] += up[own, band, :rank].double() @ down[own, matrix, :rank].double()
    slots = (
        torch.arange(tokens, dtype=torch.int32, device=device) % 3 if tokens > 1 else torch.ones(1, device=device).int()
    )
    gate = (1.702, 7.0) if kind == "biased" else None
    both = biases or (None, None)
    routed = route(torch.randn(tokens, experts, device=device), MOE, None, count=tokens > 16)
    given = ExpertMatrices(*kept, *both, gate, adapted=PairAdapters(*stacks, slots))
    plain = reference.experts(x, *kept, routed.ids, routed.weights, "silu", *both, gate, given.adapted)
    got = fast.multiply(x, given, routed, "silu")
    for found in (plain, got):
        for token, slot in enumerate(slots.tolist()):
            row, choice = (
                slice(token, token + 1),
                (routed.ids[token, None], routed.weights[token, None].double(), "silu"),
            )
            wide_biases = [bias.double() for bias in biases] or (None, None)
            exact = reference.experts(x[row].double(), *(each[slot] for each in merged), *choice, *wide_biases, gate)
            assert_near(found[row], exact, 1e-5)


@pytest.mark.parametrize("tokens", [1, 3, 20])
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(torch.float16, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_experts_of_4_bit_floats(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(5)
    x = torch.randn(tokens, 96, device=device, dtype=dtype)
    parts = []
    for outputs, inputs in ((128, 96), (96, 64)):
        codes = torch.randint(16, (5 * outputs, inputs), dtype=torch.uint8)
        powers = torch.randint(118, 124, (5 * outputs, inputs // 32), dtype=torch.uint8)
        packed = fp4.pack(fp4.FloatRows(codes, powers))
        parts.append(fp4.Fp4Rows(*(part.view(5, outputs, -1).to(device) for part in packed)))
    biases = [torch.randn(5, size, device=device).to(dtype) for size in (128, 96)]
    routed = route(torch.randn(tokens, 5, device=device), replace(MOE, experts=5), None, count=tokens > 16)
    got = fast.multiply(x, ExpertMatrices(*parts, *biases, (1.702, 7.0)), routed, "silu")
    wide, choice = [bias.double() for bias in biases], (routed.ids, routed.weights.double(), "silu")
    exact = reference.experts(x.double(), *parts, *choice, *wide, (1.702, 7.0))
    assert_near(got, exact, 1e-5 if dtype == torch.float32 else None)


def test_packed_4_bit_floats_are_those_of_the_checkpoint() -> None:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes, powers = (torch.randint(most, (7, n), dtype=torch.uint8) for most, n in ((16, 160), (255, 5)))
    signs = torch.where(codes < 8, 1.0, -1.0)
    expected = values[(codes & 7).long()] * signs * torch.exp2(powers.float() - 127).repeat_interleave(32, dim=1)
    assert torch.equal(fp4.dequantize(fp4.pack(fp4.FloatRows(codes, powers)), 160), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 64, 256, 4000])
@pytest.mark.parametrize("shape", [(128, 8, 768, 2048), (64, 6, 1408, 2048)])
def test_cuts_of_4_bits_multiply_right(tokens: int, shape: tuple[int, int, int, int], group: int) -> None:
    experts, top, inner, hidden = shape
    moe, device = MoEConfig(experts, top, inner), torch.device("cuda")
    torch.manual_seed(3)
    x, matrices = (
        torch.randn(tokens, hidden, device=device).bfloat16(),
        packed_experts(group, device, moe, hidden, inner),
    )
    logits = torch.randn(tokens, experts, device=device, dtype=torch.bfloat16)
    got = fast.routed_experts(x, logits, None, moe, ExpertMatrices(*matrices), "silu")
    ids, weights = plain_routing.route(logits, moe, None)
    assert_near(got, reference.experts(x.float(), *matrices, ids, weights, "silu"), 2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [0, 128])
def test_deterministic_products_of_8_bits_do_not_depend_on_the_batch(group: int) -> None:
    moe, device = MoEConfig(64, 6, 256), torch.device("cuda")
    torch.manual_seed(4)
    x = torch.randn(700, 512, device=device, dtype=torch.bfloat16)
    router, matrices = torch.randn(64, 512, device=device).bfloat16(), small_experts(group, device, moe, 512, 256)
    whole = INVARIANT.routed_experts(x, Router(router), Experts(moe, ExpertMatrices(*matrices), "silu"))
    for first, last in ((0, 1), (1, 3), (3, 40), (40, 700)):
        part = INVARIANT.routed_experts(
            x[first:last].contiguous(), Router(router), Experts(moe, ExpertMatrices(*matrices), "silu")
        )
        assert torch.equal(part, whole[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 17, 64, 256, 1000, 4000])
@pytest.mark.parametrize("shape", [(128, 8, 768, 2048), (64, 6, 1408, 2048), (8, 2, 528, 1040)])
def test_cuts_of_8_bits_multiply_right(tokens: int, shape: tuple[int, int, int, int], group: int) -> None:
    experts, top, inner, hidden = shape
    moe, device = MoEConfig(experts, top, inner), torch.device("cuda")
    torch.manual_seed(3)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    matrices = small_experts(group, device, moe, hidden, inner)
    logits = torch.randn(tokens, experts, device=device, dtype=torch.bfloat16)
    got = fast.routed_experts(x, logits, None, moe, ExpertMatrices(*matrices), "silu")
    ids, weights = plain_routing.route(logits, moe, None)
    if config_for(tokens, top, experts, fp8=True, grouped=group > 0).small_rows:
        # A sum that lies in the middle between two numbers of 8 bits may become either.
        assert_near(got, by_hand(x, *matrices, Routed(ids, weights), group), 2e-2, times=4)
    else:
        assert_near(got, reference.experts(x.float(), *matrices, ids, weights, "silu"), 2e-2)


@pytest.mark.gpu
def test_deterministic_products_do_not_depend_on_the_batch() -> None:
    moe, device = MoEConfig(64, 6, 256), torch.device("cuda")
    torch.manual_seed(4)
    x = torch.randn(700, 512, device=device, dtype=torch.bfloat16)
    router, gate_up, down = (
        torch.randn(*shape, device=device, dtype=torch.bfloat16) / 16
        for shape in ((64, 512), (64, 512, 512), (64, 512, 256))
    )
    whole = INVARIANT.routed_experts(x, Router(router), Experts(moe, ExpertMatrices(gate_up, down), "silu"))
    for first, last in ((0, 1), (1, 3), (3, 40), (40, 700)):
        part = INVARIANT.routed_experts(
            x[first:last].contiguous(), Router(router), Experts(moe, ExpertMatrices(gate_up, down), "silu")
        )
        assert torch.equal(part, whole[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 3, 16, 17, 64, 256, 1000])
@pytest.mark.parametrize("shape", [(128, 8, 768, 2048), (64, 6, 1408, 2048), (8, 2, 512, 1024)])
def test_cuts_of_real_shapes_multiply_right(tokens: int, shape: tuple[int, int, int, int]) -> None:
    experts, top, inner, hidden = shape
    moe, device = MoEConfig(experts, top, inner), torch.device("cuda")
    torch.manual_seed(3)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    gate_up = torch.randn(experts, 2 * inner, hidden, device=device, dtype=torch.bfloat16) / hidden**0.5
    down = torch.randn(experts, hidden, inner, device=device, dtype=torch.bfloat16) / inner**0.5
    logits = torch.randn(tokens, experts, device=device, dtype=torch.bfloat16)
    got = fast.routed_experts(x, logits, None, moe, ExpertMatrices(gate_up, down), "silu")
    ids, weights = plain_routing.route(logits, moe, None)
    exact = reference.experts(x.float(), gate_up.float(), down.float(), ids, weights, "silu")
    assert_near(got, exact, 2e-2)
    assert config_for(tokens, top, experts).block_m >= 16
