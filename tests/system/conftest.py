"""One engine and one server on the default model for all tests that need no other; always ended. Other modules count
the processes of this one, so the engine does not outlive its module; the server is a process of its own and does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bough import Engine
from tests.system.serving import Server, running


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(max_total_tokens=20_000) as started:
        yield started


@pytest.fixture(scope="session")
def model_server() -> Iterator[Server]:
    """Serves the default model. Modules share its cache."""
    with running("--max-total-tokens", "20000") as server:
        yield server


@pytest.fixture(scope="session")
def model_url(model_server: Server) -> str:
    return model_server.url
