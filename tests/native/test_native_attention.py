"""The attention of a step: near to float64, and the same to the last bit whoever else is in the step.

Sequences are laid out by hand in a small cache, some of them beginning on the same pages, so that a step of several is
computed together where their keys are the same.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bough.kernels.quant_linear.packed import aligned_bytes
from bough.native.tape import Step, Tape, ThreadPool

SLOTS, ROWS = 4096, 16
NUMBERS: dict[str, tuple[int, Any]] = {  # `enum bough_number`; bfloat16 are kept as their bits
    "float32": (0, np.float32),
    "bfloat16": (1, np.uint16),
    "float16": (2, np.float16),
}
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class Layer:
    """What attention looks like in a model."""

    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    window: int = 0
    softcap: float = 0.0
    page_size: int = 1
    number: str = "float16"
    sinks: bool = False
    both_ways: bool = False
    ends_only: bool = False


LAYERS = {
    "three heads for a key": Layer(),
    "seven heads for a key": Layer(heads=7, kv_heads=1, dim=32),
    "a head for a key, of odd size": Layer(heads=2, dim=20),
    "forty heads for a key": Layer(heads=40, kv_heads=1, dim=16),
    "large heads": Layer(heads=4, kv_heads=1, dim=256, softcap=4.0),
    "a window": Layer(window=150),
    "a short window": Layer(window=9, page_size=4),
    "a window of a block": Layer(heads=1, kv_heads=1, dim=256, window=64),
    "pages": Layer(page_size=16, dim=48),
    "bfloat16": Layer(number="bfloat16"),
    "float32": Layer(number="float32"),
    "sinks": Layer(sinks=True),
    "sinks and a window": Layer(heads=40, kv_heads=1, dim=16, window=9, sinks=True),
}
ENCODERS = {
    "both ways": Layer(heads=6, kv_heads=6, dim=32, number="float32", both_ways=True),
    "both ways on pages": Layer(page_size=16, both_ways=True),
}


def widened(cache: np.ndarray[Any, Any]) -> Floats:
    """A cache's numbers."""
    if cache.dtype == np.uint16:
        return (cache.astype(np.uint32) << 16).view(np.float32)
    return cache.astype(np.float32)


@dataclass
class Attention:
    """A tape of one operation, with caches full of numbers."""

    library: ctypes.CDLL
    layer: Layer
    threads: int = 1
    pages: np.ndarray[Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        layer, draw = self.layer, np.random.default_rng(0)
        number, kind = NUMBERS[layer.number]
        shape = (SLOTS, layer.kv_heads, layer.dim)
        caches = [draw.normal(size=shape).astype(np.float32) for _ in range(2)]
        if layer.number == "bfloat16":
            self.keys, self.values = ((c.view(np.uint32) >> 16).astype(kind) for c in caches)
        else:
            self.keys, self.values = (c.astype(kind) for c in caches)
        self.q, self.out = (np.zeros((SLOTS, layer.heads, layer.dim), dtype=np.float32) for _ in range(2))
        self.pages = np.zeros((ROWS, SLOTS // layer.page_size), dtype=np.int32)
        self.tape, self.pool = Tape(self.library), ThreadPool(self.library, self.threads)
        caches_at = (self.keys.ctypes.data, self.values.ctypes.data)
        shape_of = (layer.heads, layer.kv_heads, layer.dim)
        scale = layer.dim**-0.5
        width = layer.heads * layer.dim
        self.sinks = draw.normal(size=layer.heads).astype(np.float32) + 2 if layer.sinks else None
        sinks = None if self.sinks is None else self.sinks.ctypes.data
        limits = (layer.window, scale, layer.softcap, sinks, layer.ends_only, layer.both_ways)
        places = (self.q.ctypes.data, width, 0, self.out.ctypes.data)
        self.tape.add("attention", *shape_of, *caches_at, number, *limits, *places)
        self.scratch = aligned_bytes(self.tape.scratch_bytes(SLOTS, self.threads))

    def run(self, queries: list[tuple[int, int, Floats]], common: list[int] | None = None) -> list[Floats]:
        """For each of some rows its first position, and the queries from there on; what they get. Each has `common`
        tokens on the same pages as the one before."""
        rows = np.array([row for row, _, _ in queries], dtype=np.int32)
        before = np.array([first for _, first, _ in queries], dtype=np.int32)
        starts = np.cumsum([0, *(len(q) for _, _, q in queries)], dtype=np.int32)
        self.q[: starts[-1]] = np.concatenate([q for _, _, q in queries])
        step = Step(tokens=int(starts[-1]), batch=len(rows), rows=rows.ctypes.data, query_starts=starts.ctypes.data)
        step.context_lens, step.page_table = before.ctypes.data, self.pages.ctypes.data
        step.page_table_width, step.page_size = self.pages.shape[1], self.layer.page_size
        shared = np.array(common or [], dtype=np.int32)
        step.common = shared.ctypes.data if common else None
        self.pool.run(self.tape, step, self.scratch.ctypes.data)
        return [self.out[a:b].copy() for a, b in pairwise(starts)]

    def expected(self, row: int, first: int, queries: Floats) -> Floats:
        """In double precision."""
        layer = self.layer
        found = []
        for position, q in enumerate(queries, first):
            begin = max(0, position + 1 - layer.window) if layer.window else 0
            at = np.arange(begin, first + len(queries) if layer.both_ways else position + 1)
            slots = self.pages[row, at // layer.page_size] * layer.page_size + at % layer.page_size
            keys, values = (widened(cache[slots]).astype(np.float64) for cache in (self.keys, self.values))
            keys, values = (x.repeat(layer.heads // layer.kv_heads, axis=1) for x in (keys, values))
            scores = np.einsum("hd,khd->hk", q, keys) * layer.dim**-0.5
            if layer.softcap:
                scores = layer.softcap * np.tanh(scores / layer.softcap)
            if self.sinks is not None:
                scores = np.concatenate([scores, self.sinks[:, None]], axis=1)
                values = np.concatenate([values, np.zeros_like(values[:1])])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            found.append(np.einsum("hk,khd->hd", weights / weights.sum(axis=1, keepdims=True), values))
        return np.array(found)


def lay_out(attention: Attention, shared: int, lengths: list[int]) -> None:
    """Rows that begin on the same pages, for so many tokens, and go on with pages of their own."""
    size = attention.layer.page_size
    order = np.random.default_rng(3).permutation(attention.pages.shape[1]).astype(np.int32)
    used = -(-shared // size)
    for row, length in enumerate(lengths):
        own = -(-length // size) - shared // size
        attention.pages[row, : shared // size] = order[: shared // size]
        attention.pages[row, shared // size : shared // size + own] = order[used : used + own]
        used += own


def draw(layer: Layer, count: int, seed: int) -> Floats:
    return np.random.default_rng(seed).normal(size=(count, layer.heads, layer.dim)).astype(np.float32)


LENGTHS, SHARED = [330, 300, 261, 40, 131], 256


@pytest.mark.parametrize("name", LAYERS | ENCODERS)
def test_near_to_double_precision(any_tier: ctypes.CDLL, name: str) -> None:
    attention = Attention(any_tier, (LAYERS | ENCODERS)[name])
    lay_out(attention, SHARED, LENGTHS)
    asked = [(row, length - 5, draw(attention.layer, 5, row)) for row, length in enumerate(LENGTHS)]
    for found, (row, first, queries) in zip(attention.run(asked), asked, strict=True):
        np.testing.assert_allclose(found, attention.expected(row, first, queries), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ENCODERS)
def test_a_text_sees_all_of_itself_and_nothing_else(any_tier: ctypes.CDLL, name: str, threads: int) -> None:
    attention = Attention(any_tier, ENCODERS[name], threads)
    lay_out(attention, 0, LENGTHS)
    asked = [(row, 0, draw(attention.layer, length, row)) for row, length in enumerate(LENGTHS[2:])]
    for found, (row, first, queries) in zip(attention.run(asked), asked, strict=True):
        np.testing.assert_allclose(found, attention.expected(row, first, queries), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("name", LAYERS)
def test_the_same_alone_and_in_company(any_tier: ctypes.CDLL, name: str, threads: int) -> None:
    layer = LAYERS[name]
    alone, together = Attention(any_tier, layer), Attention(any_tier, layer, threads)
    for attention in (alone, together):
        lay_out(attention, SHARED, LENGTHS)
    asked = [(row, length - 1, draw(layer, 1, row)) for row, length in enumerate(LENGTHS)]
    expected = [alone.run([one])[0] for one in asked]
    for company in (asked, asked[:2], asked[2:], asked[:1], asked[::-1]):
        found = together.run(company)
        for (row, _, _), result in zip(company, found, strict=True):
            np.testing.assert_array_equal(result, expected[row])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", LAYERS)
def test_a_prompt_in_chunks_of_any_size(any_tier: ctypes.CDLL, name: str, threads: int) -> None:
    layer = LAYERS[name]
    whole, chunked = Attention(any_tier, layer), Attention(any_tier, layer, threads)
    for attention in (whole, chunked):
        lay_out(attention, SHARED, LENGTHS)
    prompt, other = draw(layer, 300, 1), draw(layer, 1, 2)
    expected = whole.run([(1, 0, prompt)])[0]
    np.testing.assert_allclose(expected[-3:], whole.expected(1, 297, prompt[-3:]), rtol=1e-4, atol=1e-4)
    for size in (1, 7, 133):
        firsts = range(0, 300, size) if size > 1 else range(250, 300)
        for first in firsts:
            chunk = prompt[first : first + size]
            found = chunked.run([(0, 329, other), (1, first, chunk)])[1]
            np.testing.assert_array_equal(found, expected[first : first + size])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["three heads for a key", "large heads", "a window", "bfloat16"])
def test_the_same_on_shared_pages_and_on_copies(any_tier: ctypes.CDLL, name: str, threads: int) -> None:
    layer = LAYERS[name]
    shared, copied = Attention(any_tier, layer), Attention(any_tier, layer, threads)
    lay_out(shared, SHARED, LENGTHS)
    lay_out(copied, 0, LENGTHS)
    for row, length in enumerate(LENGTHS):
        slots, sources = copied.pages[row, :length], shared.pages[row, :length]
        copied.keys[slots], copied.values[slots] = shared.keys[sources], shared.values[sources]
    asked = [(row, length - 1, draw(layer, 1, row)) for row, length in enumerate(LENGTHS)]
    for found, expected in zip(copied.run(asked), shared.run(asked), strict=True):
        np.testing.assert_array_equal(found, expected)


COMMON = [0, 384, 272, 384, 144, 384, 272, 400, 0, 16, 128, 256, 0, 0, 272, 272]
STEPS = {  # tokens of each row in the step; behind what it shares with its neighbours
    "decodes": [1] * 16,
    "short chunks": [3, 5, 1, 2, 4, 9, 2, 6] * 2,
    "chunks that fill tiles and more": [11, 2, 35, 1, 17, 10, 20, 33] * 2,
    "decodes, some with drafts, and prompts": [1, 1, 4, 1, 1, 4, 1, 1, 1, 1, 40, 3, 2, 1, 64, 7],
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", [*LAYERS, "ends alone"])
def test_the_same_where_a_common_beginning_is_read_once(
    any_tier: ctypes.CDLL, name: str, steps: str, threads: int
) -> None:
    """Branches of a tree: of all rows, of halves of them, and of pairs; some begin alone."""
    layer = LAYERS.get(name, Layer(ends_only=True))
    attention = Attention(any_tier, layer, threads)
    size, counts = layer.page_size, STEPS[steps]
    lengths = [403 + 3 * row + count for row, count in enumerate(counts)]
    pages = iter(np.random.default_rng(3).permutation(attention.pages.shape[1]).astype(np.int32))
    for row, (shared, length) in enumerate(zip(COMMON, lengths, strict=True)):
        attention.pages[row, : shared // size] = attention.pages[row - 1, : shared // size]
        for page in range(shared // size, -(-length // size)):
            attention.pages[row, page] = next(pages)
    asked = [
        (row, length - count, draw(layer, count, row))
        for row, (length, count) in enumerate(zip(lengths, counts, strict=True))
    ]
    for found, expected in zip(attention.run(asked, COMMON), attention.run(asked), strict=True):
        seen = slice(-1, None) if layer.ends_only else slice(None)
        np.testing.assert_array_equal(found[seen], expected[seen])


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_common_beginning_is_read_from_one_rows_pages(any_tier: ctypes.CDLL, tokens: int) -> None:
    """Decodes and chunks of prompts: every other row's own table leads to numbers that would be seen in any result."""
    layer = LAYERS["sinks"]
    attention = Attention(any_tier, layer)
    rows, shared = 12 // tokens, 256
    lay_out(attention, shared, [shared + 20 + row for row in range(rows)])
    asked = [(row, shared + 20 + row - tokens, draw(layer, tokens, row)) for row in range(rows)]
    expected = attention.run(asked)
    attention.values[SLOTS - 1] = np.nan
    attention.pages[1:rows:2, :shared] = SLOTS - 1
    for found, right in zip(attention.run(asked, [0, *[shared] * (rows - 1)]), expected, strict=True):
        np.testing.assert_array_equal(found, right)
    assert np.isnan(attention.run(asked)[1]).all()
