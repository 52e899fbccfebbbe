"""Where a request goes on whose stream broke: what was delivered of it, and the seed of what follows.

Random numbers are a function of the seed and the output position, so the same tokens follow on any engine that serves
the same model.
"""

from __future__ import annotations

from dataclasses import dataclass

from bough.core.plan import IntArray


@dataclass(frozen=True, slots=True)
class Resumption:
    """`output_ids` may be empty: then the stream has begun and brought no token yet."""

    output_ids: IntArray
    seed: int | None = None  # None: that of the request
