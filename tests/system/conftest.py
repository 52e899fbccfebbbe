"""One engine on the default model for all tests that need no other; always ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bough import Engine


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with Engine(dtype="float32", quantization="none", max_total_tokens=20_000) as started:
        yield started
