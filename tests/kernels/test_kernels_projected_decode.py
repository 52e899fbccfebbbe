"""Decode attention from the projection: against the reference in float64, and as its two parts one after the other."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import triton

from bough.kernels.decode_attention import triton as decode
from bough.kernels.decode_attention.triton import DecodeConfig
from bough.kernels.decode_attention.work import DecodeWork, _plan, plan_decode
from bough.kernels.norm_rope_store.reference import QKNormRope, norm_rope_store_
from bough.kernels.projected_decode.triton import MOST_ROWS, projected_decode
from bough.kernels.skinny_linear.triton import skinny_linear
from tests.kernels.closeness import assert_near
from tests.kernels.references.paged_attention import decode_attention
from tests.kernels.test_kernels_decode_attention import SINKS, few_programs, make

EPS = 1e-6


@dataclass
class Step:
    """Rows of these lengths, whose newest token's key and value are not in the caches yet: NaN stands there."""

    qkv: torch.Tensor
    norms: tuple[torch.Tensor | None, torch.Tensor | None]
    plus_one: bool
    angles: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    paged: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    heads: int
    kv_heads: int
    page_size: int

    def run(self, function: Any, dtype: torch.dtype, work: DecodeWork | None = None, **options: Any) -> list[Any]:
        """What comes out, and the caches afterwards."""
        if work is None and self.qkv.device.type == "cpu":
            shape = (len(self.qkv), self.heads, self.kv_heads, self.qkv.shape[2])
            work = few_programs(*shape, self.paged[2], options.get("window"))
        q_norm, k_norm = (None if weight is None else weight.to(dtype) for weight in self.norms)
        tables = (self.angles.double().cos(), self.angles.double().sin())
        cos, sin = tables if dtype == torch.float64 else (table.float() for table in tables)
        caches = [cache.to(dtype, copy=True) for cache in self.caches]
        out = function(
            self.qkv.to(dtype, copy=True), self.heads, self.kv_heads,
            QKNormRope(q_norm, k_norm, EPS, self.plus_one, cos, sin), self.positions, self.slots, *caches, *self.paged,
            work, page_size=self.page_size, scale=0.2, **options,
        )  # fmt: skip
        return [out, *caches]

    def attended(self, **options: Any) -> torch.Tensor:
        """What comes out if heads are turned in their own type, which rounds them twice, and attend in float64."""
        qkv, (keys, values) = self.qkv.clone(), (cache.clone() for cache in self.caches)
        turn = QKNormRope(*self.norms, EPS, self.plus_one, self.angles.cos(), self.angles.sin())
        norm_rope_store_(qkv, self.heads, self.kv_heads, turn, self.positions, self.slots, keys, values)
        inputs: list[Any] = [*(tensor.double() for tensor in (qkv[:, : self.heads], keys, values)), *self.paged, None]
        return decode_attention(*inputs, page_size=self.page_size, scale=0.2, **options)


def reference(qkv: torch.Tensor, heads: int, kv_heads: int, *inputs: Any, **options: Any) -> torch.Tensor:
    """The two operations that the kernel stands for, one after the other."""
    *turned, page_table, rows, lengths, _ = inputs
    norm_rope_store_(qkv, heads, kv_heads, *turned)
    return decode_attention(qkv[:, :heads], *turned[-2:], page_table, rows, lengths, **options)


def make_step(
    lengths: list[int], device: torch.device, heads: int = 4, kv_heads: int = 2, head_dim: int = 64,
    page_size: int = 1, dtype: torch.dtype = torch.float16, normed: bool = True, plus_one: bool = False,
) -> Step:  # fmt: skip
    case = make(lengths, device, heads, kv_heads, head_dim, page_size, dtype)
    newest = case.lengths.long() - 1
    slots = case.page_table[case.rows.long(), newest // page_size].long() * page_size + newest % page_size
    case.k_cache[slots], case.v_cache[slots] = float("nan"), float("nan")
    norms = tuple(torch.randn(head_dim, device=device).to(dtype) if normed else None for _ in range(2))
    angles = torch.randn(max(lengths), head_dim // 2, device=device) * 3
    qkv = torch.randn(len(lengths), heads + 2 * kv_heads, head_dim, device=device).to(dtype)
    paged = (case.page_table, case.rows, case.lengths)
    caches = (case.k_cache, case.v_cache)
    return Step(qkv, norms, plus_one, angles, newest, slots, caches, paged, heads, kv_heads, page_size)  # type: ignore[arg-type]


def check(step: Step, **options: Any) -> None:
    out, *caches = step.run(projected_decode, step.qkv.dtype, **options)
    for own in ("config", "work", "ahead", "columns"):
        options.pop(own, None)
    expected, *expected_caches = step.run(reference, torch.float64, **options)
    assert out.is_contiguous()
    assert_near(out, step.attended(**options))
    assert_near(out, expected, times=2.0)
    others = torch.ones(len(caches[0]), dtype=torch.bool, device=out.device)
    others[step.slots] = False
    for cache, wanted, before in zip(caches, expected_caches, step.caches, strict=True):
        assert_near(cache[step.slots], wanted[step.slots])
        assert torch.equal(cache[others].nan_to_num(7.0), before[others].nan_to_num(7.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("ahead", [False, True])
def test_rows_of_many_lengths(device: torch.device, dtype: torch.dtype, page_size: int, ahead: bool) -> None:
    check(make_step([1, 2, 127, 128, 129, 300], device, dtype=dtype, page_size=page_size), ahead=ahead)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("behind", [1, 150])
def test_tokens_that_rotate_by_earlier_places_than_theirs(device: torch.device, ahead: bool, behind: int) -> None:
    """As behind an image: the row's newest token is told by its length, whatever it rotates by."""
    step = make_step([151, 300, 700], device)
    step.positions -= behind
    work = DecodeWork(3, 4, 2, 64, device, programs=16)
    plan_decode(step.paged[2], work)
    check(step, work=work, ahead=ahead)


def in_columns(lengths: list[int], width: int, device: torch.device, **options: Any) -> Step:
    """Rows that have so many tokens each, the last at these lengths."""
    step = make_step(lengths, device, **options)
    (table, rows, ends), count = step.paged, len(lengths)
    ends = torch.cat([ends - width + 1 + column for column in range(width)])
    rows, newest = rows.repeat(width), ends.long() - 1
    slots = table[rows.long(), newest // step.page_size].long() * step.page_size + newest % step.page_size
    for cache in step.caches:
        cache[slots] = float("nan")
    qkv = torch.randn(width * count, *step.qkv.shape[1:], device=device).to(step.qkv.dtype)
    return replace(step, qkv=qkv, positions=newest, slots=slots, paged=(table, rows, ends))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("width", [2, 3, 8])
def test_rows_that_have_several_tokens(device: torch.device, width: int, page_size: int, ahead: bool) -> None:
    step = in_columns([8, 130, 257, 301], width, device, page_size=page_size)
    check(step, columns=4, ahead=ahead)


@pytest.mark.parametrize("options", [{"window": 5}, {"window": 140}, {"softcap": 1.5}])
def test_several_tokens_under_a_window_or_a_cap(device: torch.device, options: dict[str, Any]) -> None:
    check(in_columns([9, 290], 6, device, heads=9, kv_heads=3, normed=False), columns=2, **options)


def test_several_tokens_beside_padding(device: torch.device) -> None:
    """In columns that a row has no token for stands a row of one key on page 0."""
    step = in_columns([140, 140], 2, device)
    padding = next(row for row in range(len(step.paged[0])) if row not in step.paged[1].tolist())
    step.paged[0][padding, 0] = 0
    step.paged[1][3], step.paged[2][3], step.slots[3], step.positions[3] = padding, 1, 0, 0
    out, *_ = step.run(projected_decode, step.qkv.dtype, columns=2)
    expected, *_ = step.run(reference, torch.float64)
    assert_near(out[:3], expected[:3], times=2.0)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(("normed", "plus_one"), [(False, False), (True, True)])
def test_norms(device: torch.device, normed: bool, plus_one: bool) -> None:
    check(make_step([3, 140], device, normed=normed, plus_one=plus_one))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(1, 1, 64), (9, 3, 64), (4, 4, 80), (6, 2, 96), (16, 1, 128), (20, 1, 16), (2, 1, 256)],
)
def test_head_shapes(device: torch.device, heads: int, kv_heads: int, head_dim: int) -> None:
    check(make_step([3, 200], device, heads, kv_heads, head_dim))


@pytest.mark.parametrize("window", [1, 40, 130, 1000])
def test_window(device: torch.device, window: int) -> None:
    for ahead in (False, True):
        check(make_step([1, 39, 41, 290], device), window=window, ahead=ahead)


def test_softcap_and_small_blocks(device: torch.device) -> None:
    step = make_step([20, 150], device)
    check(step, softcap=1.5)
    for ahead in (False, True):
        check(step, config=DecodeConfig(block_n=16, num_warps=2, num_stages=3), ahead=ahead)


def test_sinks_count_once_however_many_parts_a_row_has(device: torch.device) -> None:
    step = make_step([1, 2, 700], device)
    work = DecodeWork(3, 4, 2, 64, device, programs=16)
    plan_decode(step.paged[2], work)
    assert int(work.items[2, 3]) > 1
    for ahead in (False, True):
        check(step, work=work, sinks=SINKS.to(device), ahead=ahead)


def test_work_made_for_more_rows_serves_fewer_again_and_again(device: torch.device) -> None:
    work = DecodeWork(8, 4, 2, 64, device)
    for lengths in ([700, 2], [5, 5, 300]):
        step = make_step(lengths, device)
        plan_decode(step.paged[2], work)
        check(step, work=work)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (10, 2), (4, 4)])
def test_rows_in_more_parts_than_are_weighed_at_once(
    device: torch.device, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "WEIGHED_NUMBERS", 2 * 16 * triton.next_power_of_2(heads // kv_heads))
    check(make_step([700, 5, 300], device, heads, kv_heads, head_dim=16))


def test_padding_stores_to_one_place_and_harms_nobody(device: torch.device) -> None:
    """As in a captured step: rows of one key on page 0 behind the real ones."""
    step = make_step([140, 1, 1], device)
    step.slots[1:] = 0
    step.paged[0][step.paged[1][1:].long(), 0] = 0
    out, *caches = step.run(projected_decode, step.qkv.dtype)
    expected, *_ = step.run(reference, torch.float64)
    assert_near(out[:1], expected[:1], times=2.0)
    assert torch.isfinite(out).all()
    assert_near(caches[1][step.slots[0]], step.qkv[0, -step.kv_heads :].double())


def test_the_plan_is_launched_without_overlap() -> None:
    """Attention reads the items before its turn, so they must be there when it begins."""
    assert "OVERLAP" not in inspect.signature(_plan.fn).parameters


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_it_waits_for_the_projection(device: torch.device, rows: int) -> None:
    """Layers in a captured graph, each behind a product that takes longer than setting up what follows: whatever the
    inputs, each attends with its own projection."""
    heads, kv_heads, head_dim, inputs, layers = 16, 8, 128, 8192, 6
    steps = [make_step([100 + 90 * i for i in range(rows)], device, heads, kv_heads, head_dim) for _ in range(layers)]
    weight = torch.randn((heads + 2 * kv_heads) * head_dim, inputs, device=device).half() * inputs**-0.5
    xs = [torch.zeros(rows, inputs, dtype=torch.float16, device=device) for _ in steps]
    tables = steps[0].angles.cos(), steps[0].angles.sin()
    work = DecodeWork(rows, heads, kv_heads, head_dim, device)

    def run() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        plan_decode(steps[0].paged[2], work)
        projections, outs = [], []
        for step, x in zip(steps, xs, strict=True):
            projections.append(skinny_linear(x, weight).view(rows, -1, head_dim))
            inner = (heads, kv_heads, QKNormRope(*step.norms, EPS, False, *tables), step.positions, step.slots)
            around: list[Any] = [*step.caches, *step.paged, work]
            outs.append(projected_decode(projections[-1], *inner, *around, page_size=1, scale=0.2))
        return projections, outs

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        projections, outs = run()
    for _ in range(20):
        for x in xs:
            x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for step, projection, out in zip(steps, projections, outs, strict=True):
            assert_near(out, replace(step, qkv=projection, angles=steps[0].angles).attended())


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (16, 8), (32, 8), (12, 2)])
def test_on_the_gpu(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int
) -> None:
    lengths = [1, 900, 64, 333, 129, 2100]
    assert len(lengths) <= MOST_ROWS
    step = make_step(lengths, device, heads, kv_heads, head_dim, page_size, dtype)
    for window, ahead in ((None, True), (100, False)):
        check(step, window=window, ahead=ahead)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [2, 4, 8, 16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (16, 8, 128)])
def test_several_tokens_on_the_gpu(
    device: torch.device, heads: int, kv_heads: int, head_dim: int, width: int, dtype: torch.dtype
) -> None:
    for lengths in ([20, 900, 131], [2100]):
        step = in_columns(lengths, width, device, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
        check(step, columns=len(lengths), ahead=True)
