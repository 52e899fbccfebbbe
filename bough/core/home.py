"""Where Bough keeps what it has fetched or made: models, packed weights, compiled kernels, traces."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`BOUGH_HOME`, or `bough` in the user's cache folder."""
    chosen = os.environ.get("BOUGH_HOME")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "bough"
