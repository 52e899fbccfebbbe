"""Structural tags: free text with structured stretches in it, in either of the forms that clients write.

The short form, `{type, structures: [{begin, schema, end}], triggers}`, becomes the long one: a tree of formats, checked
by name and field, with its schemas and grammars lowered to rules.
"""

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from bough.constrained.ebnf import parse_ebnf
from bough.constrained.ebnf_writer import ebnf_text
from bough.constrained.limits import MAX_DEPTH, require_positions
from bough.constrained.pattern_tree import pattern_text, positions
from bough.constrained.regexes import parse_regex
from bough.constrained.schema_grammar import schema_rules
from bough.constrained.schema_lowering import lower_schema
from bough.constrained.schema_source import join
from bough.constrained.type_forms import Gap
from bough.core.errors import RequestError
from bough.core.files import table_beside
from bough.core.sampling_params import ANY_JSON

Json = dict[str, Any]

TYPES: dict[str, type] = {"text": str, "list": list, "object": dict, "flag": bool, "number": int}
FIELDS, OPTIONS = (  # by type of format: the fields it must have, and those it may have
    {
        kind: {name: tuple(TYPES[word] for word in words.split()) for name, words in fields.items()}
        for kind, fields in table.items()
    }
    for table in table_beside(__file__, "tags.toml").values()
)
SHORT = ("type", "structures", "triggers")
STRUCTURE = ("begin", "schema", "end")
LONG = ("type", "format")


def lower_tag(tag: Json, any_whitespace: bool, backend: str, field: str) -> tuple[Json, tuple[Gap, ...]]:
    lowering = _TagLowering(any_whitespace, backend, field)
    if tag.get("type") not in ("structural_tag", None):
        raise lowering.error("/type", f"must be 'structural_tag', not {tag['type']!r}")
    if "structures" in tag:
        formatted = lowering.short(tag)
    elif isinstance(tag.get("format"), dict):
        lowering.refuse_others(tag, LONG, "")
        formatted = lowering.format(tag["format"], "/format", 0)
    else:
        raise lowering.error("", "needs either structures and triggers, or a format")
    return {"type": "structural_tag", "format": formatted}, tuple(lowering.gaps)


def xgrammar_tag(found: Any) -> Any:
    """A tag, or a part of one, as xgrammar reads it: rules become grammars in its language."""
    if isinstance(found, list):
        return [xgrammar_tag(part) for part in found]
    if not isinstance(found, dict):
        return found
    if "rules" in found:
        return {"type": "grammar", "grammar": ebnf_text(found["rules"])}
    if found.get("type") == "json_schema":
        return found
    return {key: xgrammar_tag(value) for key, value in found.items()}


class _TagLowering:
    def __init__(self, any_whitespace: bool, backend: str, field: str) -> None:
        self.gaps: list[Gap] = []
        self._any_whitespace = any_whitespace
        self._backend = backend
        self._field = field

    def error(self, path: str, reason: str) -> RequestError:
        place = f"{self._field}#{path}" if path else self._field
        return RequestError(f"{place} {reason}.", field=self._field)

    def short(self, tag: Json) -> Json:
        self.refuse_others(tag, SHORT, "")
        structures, triggers = tag["structures"], tag.get("triggers")
        if not isinstance(structures, list) or not structures:
            raise self.error("/structures", "must be a list of {begin, schema, end}")
        tags = []
        for index, structure in enumerate(structures):
            path = f"/structures/{index}"
            if not isinstance(structure, dict) or any(structure.get(name) is None for name in STRUCTURE):
                raise self.error(path, "must be an object with begin, schema and end")
            self.refuse_others(structure, STRUCTURE, path)
            written = {"type": "tag", "begin": structure["begin"], "content": {}, "end": structure["end"]}
            self._check_fields(written, "tag", path)
            tags.append({**written, "content": self._schema(structure["schema"], f"{path}/schema")})
        return self._triggered({"type": "triggered_tags", "triggers": triggers, "tags": tags}, "")

    def refuse_others(self, found: Json, known: Collection[str], path: str) -> None:
        """Nothing that is asked is ignored."""
        for name in found:
            if name not in known:
                raise self.error(f"{path}/{name}", f"cannot be enforced; known here are: {', '.join(known)}")

    def format(self, found: Any, path: str, depth: int) -> Json:
        if depth > MAX_DEPTH:
            raise self.error("", f"is nested deeper than {MAX_DEPTH} levels")
        kind = found.get("type") if isinstance(found, dict) else None
        if kind is None and isinstance(found, dict) and "begin" in found:
            found, kind = {"type": "tag", **found}, "tag"
        if not isinstance(kind, str) or kind not in FIELDS:
            raise self.error(path, f"has an unknown type, {kind!r}; known are: {', '.join(FIELDS)}")
        self._check_fields(found, kind, path)
        match kind:
            case "json_schema":
                return self._schema(found["json_schema"], f"{path}/json_schema", found.get("style", "json"))
            case "regex":
                tree = parse_regex(found["pattern"], field=f"{self._field}#{path}/pattern")
                require_positions(positions(tree), self._field)
                return {"type": "regex", "pattern": pattern_text(tree)}
            case "grammar":
                return {"type": "grammar", "rules": parse_ebnf(found["grammar"], f"{self._field}#{path}/grammar")}
            case "triggered_tags":
                return self._triggered(self._inside(found, path, depth), path)
        return self._inside(found, path, depth)

    def _inside(self, found: Json, path: str, depth: int) -> Json:
        inner = dict(found)
        if "content" in found:
            inner["content"] = self.format(found["content"], f"{path}/content", depth + 1)
        for name in ("elements", "tags"):
            if name in found:
                if not found[name]:
                    raise self.error(f"{path}/{name}", "is empty")
                inner[name] = [
                    self.format(part, join(path, name, index), depth + 1) for index, part in enumerate(found[name])
                ]
        return inner

    def _check_fields(self, found: Json, kind: str, path: str) -> None:
        allowed = {"type": (str,), **FIELDS[kind], **OPTIONS.get(kind, {})}
        for name in FIELDS[kind].keys() - found.keys():
            raise self.error(path, f"needs {name!r}")
        for name, value in found.items():
            if name not in allowed:
                raise self.error(f"{path}/{name}", f"cannot be enforced; a {kind} has: {', '.join(allowed)}")
            if not isinstance(value, allowed[name]):
                raise self.error(f"{path}/{name}", f"is of the wrong type, {type(value).__name__}")
        for name in ("triggers", "excludes"):
            if any(not isinstance(text, str) or not text for text in found.get(name, ())):
                raise self.error(f"{path}/{name}", "must be a list of non-empty strings")
        if kind == "repeat" and found["max"] != -1 and not 0 <= found["min"] <= found["max"]:
            raise self.error(path, "needs 0 ≤ min ≤ max, or max -1 for no limit")
        if kind == "repeat":
            require_positions(max(found["min"], found["max"]), self._field)

    def _triggered(self, found: Json, path: str) -> Json:
        """Each tag must begin with one trigger: that is how it is recognised."""
        triggers = found["triggers"]
        if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
            raise self.error(f"{path}/triggers", "must be a non-empty list of non-empty strings")
        for index, tag in enumerate(found["tags"]):
            if tag.get("type") != "tag":
                raise self.error(f"{path}/tags/{index}", "must be a tag")
            if sum(tag["begin"].startswith(trigger) for trigger in triggers) != 1:
                reason = f"has a tag that begins with {tag['begin']!r}, which must be exactly one trigger's"
                raise self.error(path, reason)
        return found

    def _schema(self, schema: Any, path: str, style: str = "json") -> Json:
        if style != "json" and self._backend != "xgrammar":
            raise self.error(path, f"is asked in the style {style!r}, which only the back end xgrammar can enforce")
        place = f"{self._field}#{path}"
        plain, gaps = lower_schema(self._read(schema, path), place)
        self.gaps += [replace(gap, path=path + gap.path) for gap in gaps]
        if style == "json":
            return {"type": "json_schema", "rules": schema_rules(plain, self._any_whitespace, place)}
        if '"multipleOf"' in json.dumps(plain):
            self.gaps.append(Gap(path, f"has multipleOf, which cannot be enforced in the style {style!r}"))
        return {"type": "json_schema", "json_schema": plain, "style": style}

    def _read(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, str):
            return schema
        try:
            return {} if schema == ANY_JSON else json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise self.error(path, f"is not valid JSON: {error}") from None
