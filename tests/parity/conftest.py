"""Engines for the parity tests, each started at most once a session and always shut down.

Tests share an engine and so its cache: one that depends on an empty cache flushes it first.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import bough
from tests.parity import golden as golden_file
from tests.parity.engines import fp32_engine
from tests.parity.golden import Golden


@pytest.fixture(scope="session")
def golden() -> Golden:
    return golden_file.read()


@pytest.fixture(scope="session")
def token_engine() -> Iterator[bough.Engine]:
    """Everything at its default: page size 1, overlap, mixed chunks."""
    with fp32_engine() as engine:
        yield engine


@pytest.fixture(scope="session")
def page_engine() -> Iterator[bough.Engine]:
    """The other way: pages of 16, small chunks, every step committed before the next is planned."""
    with fp32_engine(page_size=16, chunked_prefill_size=32, disable_overlap_schedule=True) as engine:
        yield engine


@pytest.fixture(params=["token_engine", pytest.param("page_engine", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> bough.Engine:
    """Each of the two in turn, with nothing cached."""
    chosen: bough.Engine = request.getfixturevalue(request.param)
    assert chosen.flush_cache()
    return chosen
