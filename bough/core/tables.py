"""Tables of constants, each a TOML file beside the module that reads it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def table_beside(module: str, name: str) -> dict[str, Any]:
    """The table `name` in the folder of the module, which gives its `__file__`."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))
