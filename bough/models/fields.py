"""Typed reading of a model's JSON files: a wrong or missing value becomes one sentence that names file and field."""

from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bough.core.errors import ModelError

T = TypeVar("T")
# By a part of the name: what is listed before any weight is looked at, and what sizes and lengths are products of.
MOST = {"num_hidden_layers": 4096, "num_labels": 1_000_000, "experts": 1 << 16, "heads": 1 << 16, "head_dim": 1 << 16}
MOST |= {"hidden_size": 1 << 20, "intermediate": 1 << 22, "factor": 1_000_000}


def file_in(folder: Path, name: str, named_by: Path) -> Path:
    """The name is judged, not where a link leads: files in the hub's cache are links to elsewhere."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ModelError(f"{named_by} names {name!r}, a file outside of its folder; do not use this model.")
    return folder / name


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"Cannot read {path}: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:  # bad JSON, bytes that are not UTF-8, or nested without end
        raise ModelError(f"{path} is not valid JSON ({error}); fetch it again.") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not a {type(content).__name__}; fetch it again.")
    return content


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one JSON object. `null` counts as absent."""

    where: str  # for errors: the file, and the part of it
    values: Mapping[str, Any]

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        return self._needed(name, self.optional_integer(name) or default)

    def optional_integer(self, name: str) -> int | None:
        return self._whole(name, 1)

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 0."""
        value = self._whole(name, 0)
        return self._needed(name, default if value is None else value)

    def _whole(self, name: str, least: int) -> int | None:
        most = next((most for part, most in MOST.items() if part in name), 2**31 - 1)
        value: int | None = self._read(
            name, int, f"a whole number from {least} to {most:,}", lambda number: least <= number <= most
        )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        return self._needed(name, self.optional_number(name) or default)

    def optional_number(self, name: str) -> float | None:
        most, what = (MOST["factor"], " and below 1,000,000") if name == "factor" else (float("inf"), "")
        value = self._read(name, int | float, f"a number above 0{what}", lambda number: 0 < number < most)
        return None if value is None else float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value: bool | None = self._read(name, bool, "true or false")
        return default if value is None else value

    def text(self, name: str, default: str) -> str:
        value: str | None = self._read(name, str, "a text")
        return default if value is None else value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of numbers above 0."""
        given = self._needed(name, self._read(name, list, "a list of numbers above 0"))
        return tuple(Fields(self.where, {name: each}).number(name) for each in given)

    def section(self, name: str) -> Fields | None:
        value = self._read(name, Mapping, "an object")
        return None if value is None else Fields(f"{self.where}, {name}", value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; none is an empty tuple."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31 for token in ids):
            raise ModelError(f"{self.where}: {name} must be a token id or a list of them, got {value!r:.200}.")
        return tuple(ids)

    def renamed(self, *names: Mapping[str, str]) -> Fields:
        """The same fields, some of them under another name too. What the first map of a chain says holds, by whichever
        name it says so."""
        merged: dict[str, Any] = {}
        for layer in reversed(self.values.maps if isinstance(self.values, ChainMap) else [self.values]):
            merged |= layer
            merged |= {meant: layer[name] for each in names for name, meant in each.items() if name in layer}
        return Fields(self.where, merged)

    def _read(self, name: str, kind: Any, what: str, allows: Callable[[Any], bool] = lambda value: True) -> Any:
        """The field's value, or None where it is absent; raises where it is not `what`."""
        value = self.values.get(name)
        if value is None:
            return None
        is_kind = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))  # True is an int, too
        if not is_kind or not allows(value):
            raise ModelError(f"{self.where}: {name} must be {what}, got {value!r:.200}.")
        return value

    def _needed(self, name: str, value: T | None) -> T:
        if value is None:
            raise ModelError(f"{self.where}: {name} is missing.")
        return value
