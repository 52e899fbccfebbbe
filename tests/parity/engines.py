"""Starts engines as the golden file was made: the default model in fp32, nothing kept quantised."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bough

ROOMY_TOKENS = 12288  # holds all golden samples with their outputs, twice over


@contextmanager
def fp32_engine(**settings: Any) -> Iterator[bough.Engine]:
    """An engine that is shut down at the end of the block; `settings` lie over those of the golden file."""
    base = {"dtype": "float32", "quantization": "none", "max_total_tokens": ROOMY_TOKENS}
    with bough.Engine(**{**base, **settings}) as engine:
        yield engine
