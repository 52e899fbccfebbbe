"""A JSON schema as a document: its parts by JSON pointer, its references and anchors, and whether it is one at all.

Only references inside the document are followed; nothing is ever fetched. A table says what shape a keyword asks for,
because a validator over the meta-schema takes milliseconds for each subschema. Forms of earlier drafts pass.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from bough.constrained.limits import MAX_DEPTH
from bough.core.errors import RequestError
from bough.core.files import table_beside

DATA_KEYWORDS = {"enum", "const", "default", "examples", "example"}  # what they hold is data, not schemas


class NotInSchema(Exception):
    """A reference leads out of the document, and how."""


class SchemaSource:
    def __init__(self, root: Any, field: str) -> None:
        self.root = root
        self.field = field
        named = root.get("$id") if isinstance(root, dict) else None
        self._base = named if isinstance(named, str) else ""
        self._parts: dict[str, Any] = {}  # those that were asked for
        self._named: dict[str, str] = {}  # absolute address or anchor → pointer
        self._index(root, "", self._base, 0)

    def at(self, pointer: str) -> Any:
        if pointer in self._parts:
            return self._parts[pointer]
        found = self.root
        for step in pointer.split("/")[1:]:
            key = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise NotInSchema(f"leads to {pointer!r}, which is not in the schema") from None
        self._parts[pointer] = found
        return found

    def target(self, reference: str) -> str:
        if reference == "#":
            return ""
        if reference.startswith("#/"):
            return unquote(reference[1:])
        address = _joined(self._base, reference) or reference
        for known in (address, reference):
            if known in self._named:
                return self._named[known]
        base, _, fragment = address.partition("#")
        if base in self._named and (not fragment or fragment.startswith("/")):
            return self._named[base] + unquote(fragment)
        text = f"names {reference!r}, which is not in the schema, and nothing is fetched; put what it names under $defs"
        raise NotInSchema(text)

    def error(self, pointer: str, reason: str) -> RequestError:
        where = f"{self.field}#{pointer}" if pointer else self.field
        return RequestError(f"{where} {reason.rstrip('.')}.", field=self.field)

    def _index(self, node: Any, pointer: str, base: str, depth: int) -> None:
        """Notes every `$id` and `$anchor`, and refuses what is nested too deep for what walks it later."""
        if depth > MAX_DEPTH:
            raise self.error("", f"is nested deeper than {MAX_DEPTH} levels")
        if isinstance(node, dict):
            if isinstance(node.get("$id"), str):
                joined = _joined(base, node["$id"])
                if joined is None:
                    raise self.error(join(pointer, "$id"), f"is not an address: {node['$id']!r:.80}")
                base = joined
                self._named.setdefault(base.rstrip("#"), pointer)
            if isinstance(node.get("$anchor"), str):
                self._named.setdefault(f"{base}#{node['$anchor']}", pointer)
            for key, value in node.items():
                if key not in DATA_KEYWORDS:
                    self._index(value, join(pointer, key), base, depth + 1)
        elif isinstance(node, list):
            for index, value in enumerate(node):
                self._index(value, join(pointer, index), base, depth + 1)


def _joined(base: str, address: str) -> str | None:
    """An address as seen from a base; None for what is none (`http://[`)."""
    try:
        urlsplit(address)  # which `urljoin` leaves out where there is no base
        return urljoin(base, address)
    except ValueError:
        return None


def join(pointer: str, *steps: str | int) -> str:
    return pointer + "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


Problem = tuple[str, str]  # where, and what is wrong there
TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})


def problems(schema: Any) -> Iterator[Problem]:
    """What is wrong with a schema and those in it, one after the other."""
    for pointer, node in _subschemas(schema):
        if not isinstance(node, dict | bool):
            yield pointer, f"{_shown(node)} is not a schema (an object, true or false)"
        for keyword, value in node.items() if isinstance(node, dict) else ():
            path = join(pointer, keyword)
            if keyword in SHAPES:
                holds, wanted = SHAPES[keyword]
                if not holds(value):
                    yield path, f"{_shown(value)} is not {wanted}"
            elif keyword in LISTS and value == []:
                yield path, "[] should be non-empty"
            elif keyword in LISTS and not isinstance(value, list):
                yield path, f"{_shown(value)} is not a list of schemas"
            elif keyword in MAPS and not isinstance(value, dict):
                yield path, f"{_shown(value)} is not an object of schemas"


def unknown(schema: Any) -> list[str]:
    """Where keywords stand that JSON Schema does not know, each of them once."""
    found: dict[str, str] = {}
    for pointer, node in _subschemas(schema):
        for keyword in node if isinstance(node, dict) else ():
            if keyword not in KNOWN and not keyword.startswith(EXTENSION):
                found.setdefault(keyword, join(pointer, keyword))
    return list(found.values())


def _subschemas(schema: Any) -> Iterator[tuple[str, Any]]:
    """A schema and all in it, with their places."""
    left = [("", schema)]
    while left:
        pointer, node = left.pop()
        yield pointer, node
        given = node.items() if isinstance(node, dict) else ()
        inner = [_schemas_in(keyword, value, join(pointer, keyword)) for keyword, value in given]
        left += reversed(list(chain.from_iterable(inner)))


def _schemas_in(keyword: str, value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, list) and (keyword in LISTS or keyword == "items"):
        return [(join(path, index), part) for index, part in enumerate(value)]
    if isinstance(value, dict) and keyword in MAPS:
        named = [(name, part) for name, part in value.items() if keyword != "dependencies" or not _is_strings(part)]
        return [(join(path, name), part) for name, part in named]
    return [(path, value)] if keyword in SCHEMAS or keyword == "items" else []


def _shown(value: Any) -> str:
    return repr(value)[:80]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def _is_type(value: Any) -> bool:
    named = [value] if isinstance(value, str) else value
    return _is_strings(named) and bool(named) and set(named) <= TYPES and len(set(named)) == len(named)


KEYWORDS: dict[str, list[str]] = {kind: each.split() for kind, each in table_beside(__file__, "keywords.toml").items()}
Shape = tuple[Callable[[Any], bool], str]
SIMPLE: dict[str, Shape] = {
    "texts": (lambda value: isinstance(value, str), "a string"),
    "flags": (lambda value: isinstance(value, bool), "true or false"),
    "numbers": (_is_number, "a number"),
    "counts": (lambda value: _is_number(value) and value >= 0 and value == value // 1, "a whole number from 0 on"),
    "values": (lambda value: isinstance(value, list), "a list"),
}
SHAPES: dict[str, Shape] = {
    "type": (_is_type, "a type, or a list of different ones"),
    "required": (lambda value: isinstance(value, bool) or _is_strings(value), "a list of names"),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    "exclusiveMinimum": (lambda value: isinstance(value, int | float), "a number"),
    "exclusiveMaximum": (lambda value: isinstance(value, int | float), "a number"),
    "dependentRequired": (
        lambda value: isinstance(value, dict) and all(map(_is_strings, value.values())),
        "an object of lists of names",
    ),
    **{name: shape for kind, shape in SIMPLE.items() for name in KEYWORDS[kind]},
}
SCHEMAS, LISTS, MAPS = (frozenset(KEYWORDS[kind]) for kind in ("schemas", "lists", "maps"))
EXTENSION = "x-"  # by agreement a remark to somebody else
KNOWN = SHAPES.keys() | SCHEMAS | LISTS | MAPS | set(KEYWORDS["unshaped"])
