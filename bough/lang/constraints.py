"""What `gen` may be held to, as the engine's sampling fields `regex` and `json_schema`. The engine does the holding; an
engine that cannot says so itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from bough.core.errors import RequestError

# What `dtype` allows, and where such a value ends.
DTYPE_REGEXES: dict[type, str] = {
    int: r"[-+]?[0-9]+[ \n]*",  # a number ends at the space behind it, where the stop cuts it off
    float: r"[-+]?[0-9]*\.?[0-9]+[ \n]*",
    bool: r"(True|False)",
    str: r'"[\w\d\s]*"',
}
DTYPE_STOPS = (" ", "\n")


def checked_regex(regex: str | None) -> str | None:
    if regex is not None:
        try:
            re.compile(regex)
        except re.error as error:
            raise RequestError(f"regex {regex!r} is not valid: {error}.", field="regex") from None
    return regex


def schema_text(schema: Mapping[str, Any] | str | type | None) -> str | None:
    if schema is None or isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping):
        return json.dumps(schema)
    described: Callable[[], Any] | None = getattr(schema, "model_json_schema", None)
    if described is None:
        raise RequestError(
            f"json_schema must be a schema, its JSON or a pydantic model, got {schema!r}.", field="json_schema"
        )
    return json.dumps(described())


def dtype_form(dtype: type | str, regex: str | None) -> tuple[str, tuple[str, ...]]:
    """What such a value looks like, and what ends it."""
    by_name = {kind.__name__: kind for kind in DTYPE_REGEXES}
    kind = by_name.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if kind not in DTYPE_REGEXES:
        raise RequestError(f"dtype must be one of {', '.join(by_name)}, got {dtype!r}.", field="dtype")
    if regex is not None:
        raise RequestError("gen() takes dtype or regex, not both.", field="dtype")
    return DTYPE_REGEXES[kind], () if kind is str else DTYPE_STOPS  # a text in quotes ends with its quote
