"""What a request may not ask for: values out of OpenAI's ranges, and features that this engine does not have.

Ranges stand in the schema, features in a table. A feature that gets built loses its row there and is read where prompts
and parameters are made; nothing else has to change.
"""

from __future__ import annotations

import functools
import typing
from typing import Any

import msgspec

from bough.core.errors import RequestError

MAX_STOPS = 128

# Fields without their feature, and the values, besides empty ones, that ask for nothing.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "structural_tag": (),
    "response_format": ({"type": "text"},),
    "tools": (),
    "tool_choice": ("auto", "none"),
    "functions": (),
    "function_call": ("auto", "none"),
    "suffix": (),
    "lora_path": (),
    "session_id": (),
    "session_params": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "return_hidden_states": (),
    "return_cached_tokens_details": (),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (None,),  # here even an empty object asks for a search
    "moderation": (),
    "prompt": (),
    "conversation": (),
    "context_management": (),
    "truncation": ("disabled",),
}


def check_request(request: msgspec.Struct) -> None:
    """Raises a `RequestError` that names the first field which cannot be served."""
    given = {name: value for name in request.__struct_fields__ if (value := getattr(request, name)) is not None}
    for name, (low, high) in _ranges(type(request)).items():
        value = given.get(name)
        if value is not None and not low <= value <= high:
            raise RequestError(f"{name} must be between {low} and {high}, got {value}.", field=name)
    for name in ("stop", "stop_regex", "stop_token_ids"):
        value = given.get(name)
        if isinstance(value, list) and len(value) > MAX_STOPS:
            raise RequestError(f"{name} has {len(value)} entries; at most {MAX_STOPS} are taken.", field=name)
    for name in given.keys() & HARMLESS.keys():
        if not _harmless(name, given[name]):
            raise RequestError(f"{name} is not supported by this server; leave it out.", field=name)


@functools.cache
def _ranges(struct: type[msgspec.Struct]) -> dict[str, tuple[float, float]]:
    """By field, the range that its annotation gives."""
    ranges = {}
    for name, hint in typing.get_type_hints(struct, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            schema = note.extra_json_schema or {}
            if "minimum" in schema:
                ranges[name] = (schema["minimum"], schema["maximum"])
    return ranges


def _harmless(name: str, value: Any) -> bool:
    if name == "prompt" and not isinstance(value, dict):  # a completion's prompt, not a stored template of prompts
        return True
    empty = not value and None not in HARMLESS[name]
    return empty or value in HARMLESS[name]
