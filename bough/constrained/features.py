"""What each back end can do with a grammar, as measured by tests/constrained/test_features.py.

Schemas are written out as grammars here (`schema_grammar`), so the back ends differ only in what a grammar may be. What
one of them cannot enforce is refused, or told in the warnings; `docs/structured-output.md` has the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Features:
    """What a grammar may be."""

    recursion: bool = True  # rules may lead back to themselves
    joins: Literal["rules", "lexemes", "patterns"] = "rules"  # how texts are written that several patterns match


FEATURES = {
    "xgrammar": Features(),
    "llguidance": Features(joins="lexemes"),
    "outlines-core": Features(recursion=False, joins="patterns"),
}
