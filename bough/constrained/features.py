"""What each back end enforces of JSON Schema, as measured by tests/constrained/test_features.py.

The lowering (`schema_lowering`) writes any schema in a small set of forms; these flags are the forms on which the back
ends differ. What a back end cannot enforce is refused, or told in the warnings; `docs/structured-output.md` has the
table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Features:
    """Forms that not every back end enforces."""

    recursion: bool = True
    length_beside_pattern: bool = False  # minLength, maxLength together with pattern or format
    several_patterns: bool = False  # more than one pattern (or format) on the same string
    fractional_multiples: bool = False  # multipleOf for numbers that are not integers
    more_beside_patterns: bool = False  # additionalProperties together with patternProperties
    property_counts: bool = True  # minProperties, maxProperties
    multiples: bool = True  # multipleOf for integers
    number_ranges: bool = True  # minimum, maximum and their exclusive forms
    json_patterns: bool = True  # patterns are written as they stand between the quotes of a JSON string


FEATURES = {
    "xgrammar": Features(),
    "llguidance": Features(
        length_beside_pattern=True,
        several_patterns=True,
        fractional_multiples=True,
        more_beside_patterns=True,
        json_patterns=False,
    ),
    "outlines-core": Features(recursion=False, property_counts=False, multiples=False, number_ranges=False),
}
