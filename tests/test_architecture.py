"""The rooms of the house and who may enter which: read from docs/architecture.md, checked against the imports."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bough.scheduler.request import Request
from bough.scheduler.rows import RowTable

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "bough"
BASE = {"core", "messages", "observability", "version"}
HEAVY = {"torch", "jax"}


def read_rooms() -> dict[str, tuple[set[str], bool]]:
    """Room → (rooms it may import, whether it may import torch), from the table in the architecture page."""
    rooms = {}
    for line in (ROOT / "docs/architecture.md").read_text().splitlines():
        match = re.match(r"\| `([\w.]+)`( \*\*T\*\*)? \|.*\| ([^|]*) \|$", line)
        if match:
            name, heavy, allowed = match.groups()
            rooms[name] = (set(re.findall(r"`([\w.]+)`", allowed)), heavy is not None)
    return rooms


ROOMS = read_rooms()


def room_of(module: str) -> str:
    parts = module.split(".")[1:]
    if len(parts) > 1 and ".".join(parts[:2]) in ROOMS:
        return ".".join(parts[:2])
    return parts[0] if parts else ""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {module_name(path) for path in FILES}


def imports_of(path: Path, *, for_types: bool = False) -> set[str]:
    """Modules that a file imports, inside functions too; with `for_types` also what only the type checker sees."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if not for_types and isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = names if node.module == "bough" else names & MODULES
            found |= modules | ({node.module} if len(modules) < len(names) else set())
    return found


def test_every_folder_is_a_room_of_the_picture() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and any(p.rglob("*.py"))}
    assert folders == {name.split(".")[0] for name in ROOMS}


def may_import(room: str, imported: str) -> bool:
    allowed, heavy = ROOMS.get(room, (set(), False))  # `memory` only holds two rooms
    if imported.split(".")[0] == "bough":
        other = room_of(imported)
        return other in ("", room) or other in BASE or other in allowed or other.split(".")[0] in allowed
    return heavy or imported.split(".")[0] not in HEAVY


def test_a_room_imports_only_what_it_may() -> None:
    rooms = {path: room_of(module_name(path)) for path in FILES}
    broken = [
        f"{module_name(path)} may not import {imported}"
        for path, room in rooms.items()
        if room not in ("", "version", "__main__")
        for imported in imports_of(path)
        if not may_import(room, imported)
    ]
    assert not broken


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """The nodes on circles, and those that lead to one."""
    left = dict(graph)
    while leaves := [name for name, others in left.items() if not others & left.keys() - {name}]:
        for name in leaves:
            del left[name]
    return sorted(left)


def test_rooms_have_no_cycles() -> None:
    circle = circle_in({name: allowed & ROOMS.keys() for name, (allowed, _) in ROOMS.items()})
    assert not circle, f"these rooms import each other in a circle: {circle}"


def test_modules_have_no_cycles() -> None:
    """An import inside a function or for types alone counts: modules that need each other are hard to read apart."""
    circle = circle_in({module_name(path): imports_of(path, for_types=True) & MODULES for path in FILES})
    assert not circle, f"these modules import each other in a circle: {circle}"


def test_every_module_says_why_it_exists() -> None:
    assert not [module_name(path) for path in FILES if not ast.get_docstring(ast.parse(path.read_text()))]


def assigned_in(path: Path) -> list[ast.Attribute]:
    """The attributes that a file assigns to or deletes, whole or in part; those of `self` belong to its class."""
    stores = (ast.Store, ast.Del)
    targets = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(getattr(node, "ctx", None), stores)]
    found = []
    for target in targets:
        node: ast.AST = target
        while isinstance(node, ast.Subscript):
            node = node.value
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") != "self":
            found.append(node)
    return found


def test_only_their_owners_change_requests_and_rows() -> None:
    """Elsewhere in the scheduler no object's attribute is assigned by a name that `Request` or `RowTable` has."""
    table = RowTable(rows=1, context_length=2, page_size=1)
    names = {"request.py": {f.name for f in dataclasses.fields(Request)}, "rows.py": set(vars(table))}
    broken = [
        f"{path.name}:{node.lineno} assigns to {ast.unparse(node)}; only {owner} may"
        for path in sorted((PACKAGE / "scheduler").glob("*.py"))
        for node in assigned_in(path)
        for owner, fields in names.items()
        if path.name != owner and node.attr in fields
    ]
    assert not broken


@pytest.mark.parametrize(
    "module",
    [
        "bough",
        "bough.cli.main",
        "bough.client.handle",
        "bough.lang",
        "bough.scheduler.loop",
        "bough.server.protocols",
        "bough.tokenizer.detokenizer",
    ],
)
def test_what_must_start_in_a_blink_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'transformers', 'jax'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
