"""A JSON schema as a document: its parts by JSON pointer, its references, its anchors.

Only references inside the document are followed; nothing is ever fetched.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from bough.constrained.limits import MAX_DEPTH
from bough.constrained.schema_judge import Judge
from bough.core.errors import RequestError

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
        self._judge: Judge | None = None

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
        raise NotInSchema(
            f"names {reference!r}, which is not in the schema, and nothing is fetched; put what it names under $defs"
        )

    def accepts(self, pointer: str, value: Any) -> bool:
        """Whether a value is valid against one part, references followed; `Undecided` where that takes too much."""
        if self._judge is None:
            self._judge = Judge(self.root)
        return self._judge.accepts(self.at(pointer), value)

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
