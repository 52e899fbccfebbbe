"""One engine on the default model for all tests of a module that need no other; always ended. Other modules count the
processes of this one, so it does not outlive its module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bough import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(dtype="float32", quantization="none", max_total_tokens=20_000) as started:
        yield started
