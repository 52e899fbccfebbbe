"""What --lora-paths names: the scheduler loads these adapters, and a GPU keeps memory free for their ranks."""

from __future__ import annotations

import json

from bough.core.errors import SettingsError


def adapter_paths(given: str | None) -> list[tuple[str, str, bool]]:
    """What --lora-paths names, in words or in a list as JSON: the name, the path and whether it is pinned."""
    found: list[tuple[str, str, bool]] = []
    try:
        words = json.loads(given) if given and given.lstrip()[0] == "[" else [given] if given else []
        for word in words:
            each = json.loads(word) if isinstance(word, str) and word.startswith("{") else word
            if isinstance(each, str):
                each = {"lora_name": each.rpartition("=")[0], "lora_path": each.rpartition("=")[2]}
            path = str(each["lora_path"])
            found.append((str(each.get("lora_name") or path), path, bool(each.get("pinned"))))
    except (ValueError, TypeError, AttributeError, KeyError):
        shape = "NAME=PATH, PATH or JSON objects with lora_name and lora_path"
        raise SettingsError(f"--lora-paths: {given!r} is not {shape}.") from None
    return found
