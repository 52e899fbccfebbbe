"""Grammar specs as clients ask for them: by the fields of their sampling parameters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bough.constrained.interface import GrammarSpec, spec_of
from bough.core.sampling_params import SamplingParams


def json_schema_spec(schema: Any, *, strict: bool = True, any_whitespace: bool = False) -> GrammarSpec:
    """A schema as an object, a boolean, JSON text, or a pydantic model."""
    return _spec("json_schema", schema, strict, any_whitespace)


def structural_tag_spec(tag: Any, *, strict: bool = True, any_whitespace: bool = False) -> GrammarSpec:
    return _spec("structural_tag", tag, strict, any_whitespace)


def regex_spec(pattern: str) -> GrammarSpec:
    return _spec("regex", pattern)


def ebnf_spec(grammar: str) -> GrammarSpec:
    return _spec("ebnf", grammar)


def choice_spec(choices: Sequence[str]) -> GrammarSpec:
    return _spec("choices", list(choices))


def _spec(field: str, given: Any, strict: bool = True, any_whitespace: bool = False) -> GrammarSpec:
    if isinstance(given, dict | bool):
        given = json.dumps(given)  # which escapes what has no UTF-8
    return spec_of(SamplingParams.parse({field: given, "grammar_strict": strict}), any_whitespace)
