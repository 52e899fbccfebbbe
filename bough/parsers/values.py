"""Values that a model writes without quotes: what the tool's schema says they are."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

PYTHON_WORDS = {"True": True, "False": False, "None": None}
KINDS = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
EXACT_FLOAT = 1 << 53  # up to here a float holds every whole number


def kinds_of(schema: Any) -> set[str] | None:
    """The JSON types that a schema allows; None: it does not say."""
    if not isinstance(schema, Mapping):
        return None
    declared = schema.get("type")
    if isinstance(declared, str):
        return {declared}
    if isinstance(declared, list):
        return {kind for kind in declared if isinstance(kind, str)}
    if isinstance(schema.get("enum"), list):
        return {_kind(value) for value in schema["enum"]}
    if "const" in schema:
        return {_kind(schema["const"])}
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            choices = [kinds_of(choice) for choice in schema[word]]
            return None if None in choices else {kind for choice in choices for kind in choice or ()}
    return None


def refers(schema: Any) -> bool:
    """Whether a schema refers to parts of itself, however deep they are."""
    left = [schema]
    while left:
        found = left.pop()
        if isinstance(found, Mapping):
            if "$ref" in found:
                return True
            left += found.values()
        elif isinstance(found, list):
            left += found
    return False


def expects_text(schema: Any) -> bool:
    """Whether a value can only be a string, so that it need not be looked at."""
    return kinds_of(schema) == {"string"}


def json_of(text: str, schema: Any) -> str:
    """The JSON of a value as the model wrote it: itself where it is JSON of a type that the schema allows."""
    kinds = kinds_of(schema)
    try:
        value = _read(text.strip())
    except (ValueError, RecursionError):
        return to_json(text)
    kind = _kind(value)
    fits = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds)
    is_whole = kind == "number" and value.is_integer() and abs(value) <= EXACT_FLOAT
    if is_whole and not fits and "integer" in (kinds or ()):
        return str(int(value))
    return to_json(value if fits or "string" not in (kinds or ()) else text)


def to_json(value: Any) -> str:
    """JSON that can be sent as UTF-8; raises a `ValueError` for what JSON has no word for."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which a model may write as an escape
        text = json.dumps(value)
    return text


def read_json(text: str) -> Any:
    """A JSON value; a `ValueError` for what is none, NaN and infinities among it."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _read(text: str) -> Any:
    return PYTHON_WORDS[text] if text in PYTHON_WORDS else read_json(text)


def _finite(literal: str) -> float:
    value = float(literal)
    return value if math.isfinite(value) else _refuse(literal)


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)


def _kind(value: Any) -> str:
    """Of what a JSON parser gives."""
    return KINDS.get(type(value), "object")
