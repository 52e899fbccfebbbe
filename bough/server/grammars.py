"""What an answer must match: from OpenAI's, vLLM's and Ollama's fields to the engine's.

Pure. A protocol asks for the sampling fields that its request means, and for the names under which the client knows
them, so that the engine's errors name what was sent. Native fields (`json_schema`, `regex`, ...) need no reading.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from bough.core.errors import RequestError
from bough.core.sampling_params import GRAMMAR_FIELDS, GRAMMAR_TEXTS

ANY_OBJECT = {"type": "object"}
# vLLM's spellings, and what the engine calls them.
OF_VLLM = {"json": "json_schema", "regex": "regex", "choice": "choices", "grammar": "ebnf"}
GUIDED = {f"guided_{name}": engine for name, engine in OF_VLLM.items()}
STRUCTURED_OUTPUTS = {**OF_VLLM, "structural_tag": "structural_tag"}
# Further fields of `structured_outputs` that ask for nothing when they have these values.
NOTHING_ASKED: dict[str, tuple[Any, ...]] = {
    "disable_fallback": (None, False, True),  # there is one back end
    "disable_any_whitespace": (None, False, True),  # a setting of the server (--grammar-any-whitespace)
    "disable_additional_properties": (None, False),
    "whitespace_pattern": (None, ""),
}


class GrammarFields(msgspec.Struct, kw_only=True):
    """At most one of these says what the answer must match. Native fields and vLLM's are strict: what cannot be
    enforced is refused; `response_format` is so only where it says `strict`."""

    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_decoding_backend: str | None = None  # every request uses the server's one back end (--grammar-backend)
    guided_whitespace_pattern: str | None = None
    structured_outputs: dict[str, Any] | None = None


def grammar_of(request: GrammarFields) -> dict[str, Any]:
    """The sampling fields of what an OpenAI request asks for; several of them at once are the engine's to refuse."""
    return {engine: value for engine, (value, _) in meant(request).items()}


def grammar_names(request: GrammarFields) -> dict[str, str]:
    named = {engine: theirs for engine, (_, theirs) in meant(request).items() if engine in GRAMMAR_FIELDS}
    return {engine: theirs for engine, theirs in named.items() if engine != theirs}


def format_fields(given: Mapping[str, Any], name: str = "response_format") -> dict[str, Any]:
    """The sampling fields of OpenAI's `response_format`."""
    kind = given.get("type")
    match kind:
        case "text":
            return {}
        case "json_object" if given.get("schema") is None:
            return {"json_schema": ANY_OBJECT}
        case "json_object" | "json_schema":  # with a schema the former is what other servers call the latter
            inner = given.get("json_schema", given)  # the Responses API has no inner object
            if not isinstance(inner, Mapping) or inner.get("schema") in (None, ""):
                raise RequestError(f"{name} of type json_schema needs a schema.", field=name)
            return {"json_schema": inner["schema"], "grammar_strict": _is_strict(name, inner, given)}
        case "structural_tag":
            tag = given.get("structural_tag", {key: value for key, value in given.items() if key != "strict"})
            if tag == "":
                raise RequestError(f"{name} of type structural_tag needs a tag.", field=name)
            return {"structural_tag": tag, "grammar_strict": _is_strict(name, given)}
    text = f"{name}.type must be text, json_object, json_schema or structural_tag, got {kind!r}."
    raise RequestError(text, field=name)


def _is_strict(name: str, *objects: Mapping[str, Any]) -> bool:
    """`strict` of the first of these objects that has it."""
    strict = next((found for each in objects if (found := each.get("strict")) is not None), False)
    if not isinstance(strict, bool):
        raise RequestError(f"{name}: strict must be true or false, got {strict!r}.", field=name)
    return strict


def ollama_format(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """The sampling fields of Ollama's `format`: "json", or a schema, which is enforced as far as it can be."""
    if not given:
        return {}
    if given == "json":
        return {"json_schema": ANY_OBJECT}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            given = None
    if not isinstance(given, Mapping):
        raise RequestError('format must be "json" or a JSON schema.', field="format")
    return {"json_schema": given, "grammar_strict": False}


def meant(request: GrammarFields) -> dict[str, tuple[Any, str]]:
    """By the engine's field: its value, and the client's field that asked for it."""
    found: list[tuple[str, Any, str]] = [(n, said, n) for n in GRAMMAR_TEXTS if (said := getattr(request, n)) != ""]
    found += [(engine, getattr(request, theirs), theirs) for theirs, engine in GUIDED.items()]
    if request.guided_json_object:
        found.append(("json_schema", ANY_OBJECT, "guided_json_object"))
    if request.guided_whitespace_pattern:
        instead = "blanks in JSON are a setting of the server (--grammar-any-whitespace)"
        text = f"guided_whitespace_pattern is not supported; {instead}."
        raise RequestError(text, field="guided_whitespace_pattern")
    found += _structured(request.structured_outputs or {})
    if request.response_format is not None:
        fields = format_fields(request.response_format)
        found += [(engine, value, "response_format") for engine, value in fields.items()]
    found = [given for given in found if given[1] is not None]
    for _, value, theirs in found:
        if value == "":
            raise RequestError(f"{theirs} is empty; say what the answer must match, or leave it out.", field=theirs)
    sayers = list(dict.fromkeys(theirs for _, _, theirs in found))
    if len(sayers) > 1:
        text = f"{' and '.join(sayers)} each say what the answer must match; give one of them."
        raise RequestError(text, field=sayers[1])
    return {engine: (value, theirs) for engine, value, theirs in found}


def _structured(given: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    fields: list[tuple[str, Any, str]] = []
    for name, value in given.items():
        theirs = f"structured_outputs.{name}"
        if name in STRUCTURED_OUTPUTS:
            fields.append((STRUCTURED_OUTPUTS[name], value, theirs))
        elif name == "json_object":
            fields.append(("json_schema", ANY_OBJECT if value else None, theirs))
        elif name not in NOTHING_ASKED or value not in NOTHING_ASKED[name]:
            raise RequestError(f"{theirs} is not supported by this server; leave it out.", field="structured_outputs")
    return fields
