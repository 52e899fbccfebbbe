"""From what clients write to a `GrammarSpec`: one canonical text for each meaning, so that the cache finds it again.

Keys keep their order, which is the order of the answer's properties. `prepare` decides whether a back end can enforce
it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bough.constrained.interface import GrammarSpec
from bough.core.errors import RequestError


def json_schema_spec(
    schema: Any, *, strict: bool = True, any_whitespace: bool = False, field: str = "json_schema"
) -> GrammarSpec:
    """A schema given as an object, a boolean, JSON text, or a pydantic model."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    return GrammarSpec("json_schema", _canonical(schema, field, (dict, bool)), strict, any_whitespace)


def regex_spec(pattern: str, *, field: str = "regex") -> GrammarSpec:
    return GrammarSpec("regex", _text(pattern, field))


def ebnf_spec(grammar: str, *, field: str = "ebnf") -> GrammarSpec:
    return GrammarSpec("ebnf", _text(grammar, field))


def structural_tag_spec(
    tag: Any, *, strict: bool = True, any_whitespace: bool = False, field: str = "structural_tag"
) -> GrammarSpec:
    """A tag in either form, `{type, structures, triggers}` or `{type, format}`, as an object or as JSON text."""
    return GrammarSpec("structural_tag", _canonical(tag, field, (dict,)), strict, any_whitespace)


def choice_spec(choices: Sequence[str], *, field: str = "guided_choice") -> GrammarSpec:
    if isinstance(choices, str) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise RequestError(f"{field} must be a non-empty list of strings.", field=field)
    return GrammarSpec("choice", json.dumps(list(dict.fromkeys(choices)), ensure_ascii=False))


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{field} must be a non-empty string.", field=field)
    return value


def _canonical(value: Any, field: str, allowed: tuple[type, ...]) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{field} is not valid JSON: {error}.", field=field) from None
    if not isinstance(value, allowed):
        raise RequestError(f"{field} must be a JSON object, not {type(value).__name__}.", field=field)
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{field} cannot be written as JSON: {error}.", field=field) from None
