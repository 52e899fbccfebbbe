"""Bough: an LLM serving engine that shares every prefix and ends every request with an answer or an error.

Names are loaded when they are first used, so that importing the package costs next to nothing.
"""
# ruff: noqa: F403, F405  # `bough.lang` lists the names of the language; the type checker finds them there

from typing import TYPE_CHECKING, Any

from bough.version import __version__

if TYPE_CHECKING:
    from bough.core.errors import (
        BoughError,
        EngineDeadError,
        ModelError,
        ProgramError,
        RequestError,
        ResourceError,
        SettingsError,
    )
    from bough.core.sampling_params import SamplingParams
    from bough.lang import *
    from bough.launch.engine import Engine

__all__ = [
    "REGEX_BOOL", "REGEX_FLOAT", "REGEX_INT", "REGEX_STR", "Anthropic", "BoughError", "Crusoe", "Engine",
    "EngineDeadError", "LiteLLM", "ModelError", "OpenAI", "ProgramError", "ProgramState", "RequestError",
    "ResourceError", "Runtime", "RuntimeEndpoint", "SamplingParams", "SettingsError", "VertexAI", "__version__",
    "assistant", "assistant_begin", "assistant_end", "flush_cache", "function", "gen", "gen_float", "gen_int",
    "gen_string", "get_server_info", "global_config", "greedy_token_selection", "image", "select",
    "separate_reasoning", "set_default_backend", "system", "system_begin", "system_end", "token_length_normalized",
    "unconditional_likelihood_normalized", "user", "user_begin", "user_end", "video",
]  # fmt: skip

_HOMES = {
    "Engine": "bough.launch.engine",
    "SamplingParams": "bough.core.sampling_params",
    **{name: "bough.core.errors" for name in __all__ if name.endswith("Error")},
}


def _home_of(name: str) -> str:
    """Everything else that is public is part of the frontend language."""
    return _HOMES.get(name, "bough.lang")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'bough' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_home_of(name)), name)
