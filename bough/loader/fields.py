"""Typed reading of a model's JSON files: a wrong or missing value becomes one sentence that names file and field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bough.core.errors import ModelError


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
        value = self.optional_integer(name)
        if value is None:
            value = default
        if value is None:
            raise self._missing(name)
        return value

    def optional_integer(self, name: str) -> int | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.where}: {name} must be a whole number of at least 1, got {value!r}.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.optional_number(name)
        if value is None:
            value = default
        if value is None:
            raise self._missing(name)
        return value

    def optional_number(self, name: str) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ModelError(f"{self.where}: {name} must be a number above 0, got {value!r}.")
        return float(value)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.where}: {name} must be true or false, got {value!r}.")
        return value

    def text(self, name: str, default: str) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelError(f"{self.where}: {name} must be a text, got {value!r}.")
        return value

    def section(self, name: str) -> Fields | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.where}: {name} must be an object, got {value!r}.")
        return Fields(f"{self.where}, {name}", value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; none is an empty tuple."""
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise ModelError(f"{self.where}: {name} must be a token id or a list of them, got {value!r}.")
        return tuple(ids)

    def _missing(self, name: str) -> ModelError:
        return ModelError(f"{self.where}: {name} is missing.")
