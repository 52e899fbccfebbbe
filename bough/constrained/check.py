"""What the edge asks of a grammar before a request is queued: can it be enforced, and if not all of it, what not.

Cheap and free of back ends: the work is that of `prepare`, which the engine repeats when it compiles.
"""

from __future__ import annotations

from bough.constrained.interface import GrammarSpec
from bough.constrained.prepare import prepare


def check(spec: GrammarSpec, backend: str = "xgrammar", field: str | None = None) -> tuple[str, ...]:
    """The warnings of a spec that can be served; a `RequestError` that says why it cannot."""
    return prepare(spec, backend, field).warnings
