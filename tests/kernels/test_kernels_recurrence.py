"""Recurrent layers: convolution and recurrence, each implementation against the formulas, token by token in float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

import tests.fakes.triton_interpreter  # noqa: F401
from bough.kernels.recurrence import reference
from bough.kernels.recurrence import reference as plain_conv
from bough.kernels.recurrence import triton as fast
from bough.kernels.recurrence import triton as fast_conv
from bough.kernels.recurrence.reference import StateRows
from tests.kernels.closeness import assert_near

PAGES = 9
STEPS = [
    pytest.param([1, 1, 1], id="decodes"),
    pytest.param([1, 5, 1, 35], id="mixed"),
    pytest.param([33], id="prompt"),
    pytest.param([2, 30, 33, 1, 3], id="tiles that rows share"),
]
CONVS = [pytest.param(plain_conv.causal_conv_, id="reference"), pytest.param(fast_conv.causal_conv_, id="triton")]
RULES = [
    pytest.param(reference.recurrence_, id="reference"),
    pytest.param(fast.recurrence_, id="triton"),
    pytest.param(fast.recurrence_by_tokens_, id="by tokens"),
]


def draw(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def rows_of(lengths: list[int], device: torch.device) -> StateRows:
    """Rows whose states stand in scattered pages, behind a row of the table that nobody has."""
    table = torch.zeros(12, 3, dtype=torch.int32, device=device)
    order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(1))[: len(lengths)] + 1
    rows = torch.arange(3, 3 + len(lengths), dtype=torch.int32, device=device)
    table[rows.long(), 0] = order.int().to(device)
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    several = any(length > 1 for length in lengths)
    return StateRows(table, rows, starts, torch.from_numpy(starts).to(device) if several else None)


@pytest.mark.parametrize("convolve", CONVS)
@pytest.mark.parametrize("lengths", STEPS)
@pytest.mark.parametrize(
    ("channels", "width", "silu", "dtype"), [(20, 4, True, torch.float32), (130, 3, False, torch.float16)]
)
def test_convolution(
    convolve: Callable[..., torch.Tensor],
    lengths: list[int],
    channels: int,
    width: int,
    silu: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    rows, tokens = rows_of(lengths, device), sum(lengths)
    x = draw(tokens, channels + 7, device=device, dtype=dtype)[:, 3:-4]
    weight, bias = draw(channels, width, device=device, seed=1), draw(channels, device=device, seed=2)
    tails = draw(PAGES, width - 1, channels, device=device, seed=3)
    expected, after = [], tails.double()
    for page, (begin, end) in zip(rows.pages.tolist(), pairwise(rows.query_starts.tolist()), strict=True):
        seen = torch.cat((after[page], x[begin:end].double()))
        for token in range(end - begin):
            summed = (seen[token : token + width] * weight.double().t()).sum(0) + (0 if silu else bias.double())
            expected.append(F.silu(summed) if silu else summed)
        after[page] = seen[len(seen) - width + 1 :]
    found = convolve(x, weight, None if silu else bias, tails, rows, silu)
    assert found.dtype == dtype
    assert_near(found, torch.stack(expected))
    torch.testing.assert_close(tails.double(), after)


def token_by_token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    matrices: torch.Tensor,
    rows: StateRows,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition, one head and token after the other."""
    out, after = torch.zeros(v.shape, dtype=torch.float64, device=v.device), matrices.double()
    for page, (begin, end) in zip(rows.pages.tolist(), pairwise(rows.query_starts.tolist()), strict=True):
        for t in range(begin, end):
            for head in range(v.shape[1]):
                query, key = (x[t, head // (v.shape[1] // q.shape[1])].double() for x in (q, k))
                value, state = v[t, head].double(), after[page, head]
                state = state * decay[t, head].double().exp().view(-1, 1)
                if beta is not None:
                    query, key = (x / torch.sqrt((x * x).sum() + 1e-6) for x in (query, key))
                    query = query / len(query) ** 0.5
                    value = (value - key @ state) * beta[t, head].double()
                after[page, head] = state + torch.outer(key, value)
                out[t, head] = query @ after[page, head]
    return out, after


def inputs(
    tokens: int, shape: tuple[int, int, int, int], kind: str, device: torch.device, dtype: torch.dtype
) -> tuple[Any, ...]:
    """As a layer has them: parts of one tensor."""
    heads, key_heads, key_dim, value_dim = shape
    keys, values = key_heads * key_dim, heads * value_dim
    mixed = draw(tokens, 2 * keys + values, device=device, dtype=dtype)
    q, k, v = torch.split(mixed, [keys, keys, values], dim=1)
    q, k = (x.view(tokens, key_heads, key_dim) for x in (q, k))
    rates = (tokens, heads, key_dim) if kind == "by channel" else (tokens, heads)
    decay = -draw(*rates, device=device, seed=1).exp()
    decay[tokens // 2] = -60.0  # forgets everything
    beta = None if kind == "sums" else draw(tokens, heads, device=device, dtype=dtype, seed=2).sigmoid()
    return q, k, v.view(tokens, heads, value_dim), decay, beta


@pytest.mark.parametrize("recur", RULES)
@pytest.mark.parametrize("kind", ["delta", "by channel", "sums"])
@pytest.mark.parametrize("lengths", STEPS)
def test_recurrence(recur: Callable[..., torch.Tensor], kind: str, lengths: list[int], device: torch.device) -> None:
    rows, shape = rows_of(lengths, device), (2, 1, 12, 40)  # nothing is a power of two
    given = inputs(sum(lengths), shape, kind, device, torch.float32)
    matrices = draw(PAGES, 2, 12, 40, device=device, seed=4)
    expected, after = token_by_token(*given, matrices, rows)
    found = recur(*given, matrices, rows)
    assert_near(found, expected, by_norm=1e-5)
    assert_near(matrices, after, by_norm=1e-5)


@pytest.mark.parametrize("recur", RULES)
def test_sixteen_bits_go_in_and_out_but_the_state_is_wide(
    recur: Callable[..., torch.Tensor], device: torch.device
) -> None:
    rows = rows_of([40, 1], device)
    given = inputs(41, (2, 2, 16, 16), "delta", device, torch.float16)
    matrices = draw(PAGES, 2, 16, 16, device=device, seed=4)
    expected, after = token_by_token(*given, matrices, rows)
    found = recur(*given, matrices, rows)
    assert found.dtype == torch.float16
    assert_near(found, expected)
    assert_near(matrices, after, by_norm=1e-3 if device.type == "cuda" else 1e-5)


@pytest.mark.parametrize("recur", RULES)
def test_a_key_that_comes_again_and_again_is_learned_once(
    recur: Callable[..., torch.Tensor], device: torch.device
) -> None:
    """Nothing is forgotten and shares are one: products of a chunk's keys are all one, so a sum over their powers would
    not hold."""
    rows, ones = rows_of([64], device), torch.ones(64, 1, 16, device=device)
    value = draw(64, 1, 16, device=device)
    matrices = torch.zeros(PAGES, 1, 16, 16, device=device)
    none, whole = torch.zeros(64, 1, device=device), torch.ones(64, 1, device=device)
    found = recur(ones, ones, value, none, whole, matrices, rows)
    torch.testing.assert_close(found, value / 4, atol=1e-4, rtol=1e-4)


def test_padding_behind_the_rows_of_a_captured_step_changes_nothing(device: torch.device) -> None:
    """Its rows have no tokens, and the tokens behind the last row belong to nobody; they may be anything."""
    rows = rows_of([3, 20], device)
    padded = StateRows(
        rows.table,
        F.pad(rows.rows, (0, 3), value=11),
        np.zeros(0, dtype=np.int32),
        F.pad(torch.from_numpy(rows.query_starts).to(device), (0, 3)),
    )
    given = inputs(40, (2, 1, 16, 16), "delta", device, torch.float32)
    for tensor in given:
        tensor[23:] = float("nan")
    matrices = draw(PAGES, 2, 16, 16, device=device, seed=4)
    matrices[0] = 7.0
    expected, after = token_by_token(*(tensor[:23] for tensor in given), matrices, rows)
    found = fast.recurrence_(*given, matrices, padded)
    assert_near(found[:23], expected, by_norm=1e-5)
    assert_near(matrices, after, by_norm=1e-5)
    tails, x = draw(PAGES, 3, 20, device=device), draw(40, 20, device=device)
    weight, wanted = draw(20, 4, device=device, seed=1), tails.clone()
    first = plain_conv.causal_conv_(x[:23], weight, None, wanted, rows)
    assert_near(fast_conv.causal_conv_(x, weight, None, tails, padded)[:23], first)
    assert torch.equal(tails, wanted)


def test_a_row_that_is_not_finite_fails_alone(device: torch.device) -> None:
    rows = rows_of([3, 20], device)
    given = inputs(23, (2, 1, 16, 16), "delta", device, torch.float32)
    for tensor in given:
        tensor[1] = float("nan")
    matrices = draw(PAGES, 2, 16, 16, device=device, seed=4)
    expected, _ = token_by_token(*given, matrices, rows)
    found = fast.recurrence_(*given, matrices, rows)
    assert found[1:3].isnan().all()
    assert_near(found[3:], expected[3:], by_norm=1e-5)


@pytest.mark.parametrize("convolve", CONVS)
@pytest.mark.parametrize("recur", RULES)
@pytest.mark.parametrize("kind", ["delta", "by channel", "sums"])
def test_states_of_rows_with_drafts_are_read_and_stay(
    convolve: Callable[..., torch.Tensor], recur: Callable[..., torch.Tensor], kind: str, device: torch.device
) -> None:
    rows = rows_of([4, 1, 35, 2], device)
    given = inputs(42, (2, 1, 12, 40), kind, device, torch.float32)
    x, weight = draw(42, 20, device=device), draw(20, 4, device=device, seed=1)
    kernels: list[tuple[Callable[[torch.Tensor, StateRows], torch.Tensor], torch.Tensor]] = [
        (lambda tails, of: convolve(x, weight, None, tails, of), draw(PAGES, 3, 20, device=device, seed=3)),
        (lambda matrices, of: recur(*given, matrices, of), draw(PAGES, 2, 12, 40, device=device, seed=4)),
    ]
    for kernel, before in kernels:
        on, some = before.clone(), before.clone()
        assert kernel(on, rows).equal(kernel(some, rows._replace(drafted=2)))
        first, others = rows.pages[:2], rows.pages[2:]
        assert some[first].equal(before[first]) and not on[first].equal(before[first])
        assert some[others].equal(on[others]) and not on[others].equal(before[others])
