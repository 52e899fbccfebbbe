"""Attention back ends by name. Each is imported only when chosen, so this module stays light."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from bough.core.errors import SettingsError

if TYPE_CHECKING:
    from bough.attention.base import AttentionBackend

BACKENDS = {
    "torch": "bough.attention.torch_backend:TorchAttention",
}


def build_backend(name: str) -> AttentionBackend:
    """A fresh back end."""
    if name not in BACKENDS:
        raise SettingsError(f"Unknown attention back end {name!r}; choose one of: {', '.join(sorted(BACKENDS))}.")
    module, _, attribute = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
    return backend
