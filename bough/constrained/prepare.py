"""Makes a spec ready for a back end, or refuses it: the one place that says what can be enforced.

Pure and free of back ends, so that a process which prepares starts quickly. A spec comes out with its schema lowered,
its regular expression in the common dialect, its tag in one form; with the gaps of a spec that is not strict as
warnings; with the back end that follows it; and with the word whether it is small enough to compile in a thread.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from bough.constrained.backends import resolve_backend
from bough.constrained.ebnf import inline, parse_ebnf
from bough.constrained.ebnf_writer import ebnf_text
from bough.constrained.interface import GrammarSpec
from bough.constrained.limits import (
    LIGHT_CHARS,
    LIGHT_POSITIONS,
    LIGHT_RULES,
    require_choices,
    require_positions,
    require_size,
)
from bough.constrained.pattern_tree import pattern_text, positions
from bough.constrained.regexes import parse_regex
from bough.constrained.routing import BOUNDED, UNBOUNDED, can_be_bounded, is_ambiguous, is_large
from bough.constrained.scalar_grammar import string_states
from bough.constrained.schema_grammar import schema_rules
from bough.constrained.schema_lowering import Gap, lower_schema
from bough.constrained.tags import FIELDS, lower_tag
from bough.core.errors import RequestError

MAX_TOLD = 8  # gaps named in one error
TAG_TYPES = {"structural_tag", *FIELDS}
REGULAR_ONLY = ("outlines-core",)
# Who asked is not known here, and some fields are always strict, so the advice names the places where it works.
ADVICE = (
    "Remove these keywords, or have only the rest enforced: with strict: false for a schema in response_format, "
    "text.format or tools, with grammar_strict: false in native sampling_params."
)


class Prepared(msgspec.Struct, frozen=True):
    """A spec as a back end gets it; it crosses processes."""

    spec: GrammarSpec
    backend: str  # that follows it: the one that was asked for, or one that bounds the work of a mask
    warnings: tuple[str, ...] = ()
    light: bool = False


def prepare(spec: GrammarSpec, backend: str, field: str | None = None) -> Prepared:
    """The spec in the form that the back end enforces; `field` is what the client called it."""
    name = resolve_backend(backend)
    field = field or ("choices" if spec.kind == "choice" else spec.kind)
    require_size(spec.text, field)
    prepared = _prepare(spec, name, field)
    if name == UNBOUNDED and ((ambiguous := is_ambiguous(prepared.spec)) or is_large(prepared.spec)):
        bounded = _prepare(spec, BOUNDED, field)
        return bounded if ambiguous or can_be_bounded(bounded.spec) else prepared
    return prepared


def _prepare(spec: GrammarSpec, name: str, field: str) -> Prepared:
    if name in REGULAR_ONLY and spec.kind == "structural_tag":
        raise RequestError(
            f"{field} cannot be enforced by the grammar back end {name}, which knows regular expressions only; "
            "start the server with --grammar-backend xgrammar or llguidance.",
            field=field,
        )
    match spec.kind:
        case "json_schema":
            return _prepare_schema(spec, name, field)
        case "json_object":
            return _prepare_schema(_with_text(spec, {"type": "object"}), name, field)
        case "regex":
            tree = parse_regex(spec.text, field=field)
            require_positions(size := positions(tree), field)
            return Prepared(msgspec.structs.replace(spec, text=pattern_text(tree)), name, light=_is_light(name, size))
        case "choice":
            choices = json.loads(spec.text)
            require_choices(len(choices), field)
            return Prepared(spec, name, light=_is_light(name, len(spec.text) // 64))
        case "ebnf":
            return _prepare_ebnf(spec, name, field)
        case "structural_tag":
            tag, gaps = lower_tag(json.loads(spec.text), name, field)
            lowered = _with_text(spec, tag)
            return Prepared(
                lowered, name, _judge(gaps, spec, name, field), _is_light_json(name, tag, spec.any_whitespace)
            )


def _prepare_ebnf(spec: GrammarSpec, backend: str, field: str) -> Prepared:
    rules = parse_ebnf(spec.text, field)
    size = sum(map(positions, rules.values()))
    if backend in REGULAR_ONLY:
        regular = inline(rules)
        if regular is None:
            raise RequestError(
                f"{field} is recursive, which the grammar back end {backend} cannot enforce; start the server with "
                "--grammar-backend xgrammar or llguidance.",
                field=field,
            )
        return Prepared(msgspec.structs.replace(spec, kind="regex", text=pattern_text(regular)), backend)
    return Prepared(msgspec.structs.replace(spec, text=ebnf_text(rules)), backend, light=_is_light(backend, size))


def _prepare_schema(spec: GrammarSpec, backend: str, field: str) -> Prepared:
    plain, gaps = lower_schema(json.loads(spec.text), backend, field)
    lowered = _with_text(spec, plain)
    light = _is_light_json(backend, plain, spec.any_whitespace)
    return Prepared(lowered, backend, _judge(gaps, spec, backend, field), light)


def _judge(gaps: tuple[Gap, ...], spec: GrammarSpec, backend: str, field: str) -> tuple[str, ...]:
    """The warnings of a spec. A strict one is refused, unless there is nothing in it that anybody would enforce."""
    missing = [gap for gap in gaps if not gap.says_nothing]
    told = tuple(f"{field}#{gap.path} {gap.reason} (grammar back end {backend})" for gap in missing)
    if not told or not spec.strict:
        return told + tuple(f"{field}#{gap.path} {gap.reason}" for gap in gaps if gap.says_nothing)
    more = f", and {len(told) - MAX_TOLD} more" if len(told) > MAX_TOLD else ""
    raise RequestError(
        f"Not all of {field} can be guaranteed: {'; '.join(told[:MAX_TOLD])}{more}. {ADVICE}",
        field=field,
    )


def _with_text(spec: GrammarSpec, value: Any) -> GrammarSpec:
    return msgspec.structs.replace(spec, text=json.dumps(value, ensure_ascii=False))


# ---- what may be compiled in a thread


def _is_light(backend: str, size: int) -> bool:
    """llguidance compiles lazily and within limits of its own; what the others do grows with the grammar's states."""
    return backend == "llguidance" or (backend == "xgrammar" and size <= LIGHT_POSITIONS)


def _is_light_json(backend: str, value: Any, any_whitespace: bool) -> bool:
    return _is_light(backend, 0 if backend == "llguidance" else _size(value, any_whitespace))


def _size(value: Any, any_whitespace: bool) -> int:
    """How much there is to compile in a plain schema, or in the schemas and grammars of a tag."""
    if isinstance(value, list):
        return sum(_size(part, any_whitespace) for part in value)
    if not isinstance(value, dict):
        return 0
    if value.get("type") not in TAG_TYPES:
        return _schema_size(value, any_whitespace)
    size = sum(_size(value.get(name), any_whitespace) for name in ("format", "content", "elements", "tags"))
    match value["type"]:
        case "json_schema":
            size += _schema_size(value["json_schema"], any_whitespace)
        case "regex":
            size += positions(parse_regex(value["pattern"]))
        case "grammar":
            size += sum(map(positions, parse_ebnf(value["grammar"]).values()))
    return size


def _schema_size(plain: Any, any_whitespace: bool) -> int:
    """The states of its strings, and what else there is in the grammar that it becomes."""
    states = string_states(plain)
    if states > LIGHT_POSITIONS:
        return states
    text = ebnf_text(schema_rules(plain, any_whitespace))
    return states + text.count("\n") // LIGHT_RULES + len(text) // LIGHT_CHARS
