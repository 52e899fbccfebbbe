"""Bough: an LLM serving engine that shares every prefix and never loses a request.

Names are loaded when they are first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bough.version import __version__

if TYPE_CHECKING:
    from bough.core.errors import BoughError, EngineDeadError, ModelError, RequestError, ResourceError, SettingsError
    from bough.core.sampling_params import SamplingParams
    from bough.launch.engine import Engine

__all__ = [
    "BoughError",
    "Engine",
    "EngineDeadError",
    "ModelError",
    "RequestError",
    "ResourceError",
    "SamplingParams",
    "SettingsError",
    "__version__",
]

_HOMES = {
    "Engine": "bough.launch.engine",
    "SamplingParams": "bough.core.sampling_params",
    "BoughError": "bough.core.errors",
    "EngineDeadError": "bough.core.errors",
    "ModelError": "bough.core.errors",
    "RequestError": "bough.core.errors",
    "ResourceError": "bough.core.errors",
    "SettingsError": "bough.core.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bough' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
