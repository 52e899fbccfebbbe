"""What holds for all programs of this process: the default back end and a few switches, under SGLang's names."""

import weakref
from dataclasses import dataclass
from typing import Any

from bough.core.errors import SettingsError
from bough.lang.backends.base import Backend
from bough.lang.backends.endpoint import EngineBackend


@dataclass(slots=True)
class GlobalConfig:
    """Change its fields to change the defaults."""

    verbosity: int = 0  # 1: what is cached ahead of a batch is logged; 2: each program's text, too, when it ends
    default_backend: Any = None
    skip_special_tokens_in_output: bool = True
    enable_precache_with_tracing: bool = True
    enable_parallel_encoding: bool = True  # SGLang's; branches always run in parallel here


global_config = GlobalConfig()
_wrapped: weakref.WeakKeyDictionary[Any, EngineBackend] = weakref.WeakKeyDictionary()


def set_default_backend(backend: Any) -> None:
    """The back end of programs that are not given one: an `Engine`, `RuntimeEndpoint(url)`, `OpenAI(model)` …"""
    as_backend(backend)
    global_config.default_backend = backend


def as_backend(given: Any) -> Backend:
    """What was given, or the default, as a back end."""
    given = global_config.default_backend if given is None else given
    if given is None:
        raise SettingsError("There is no back end; call set_default_backend(...) or give backend= to run.")
    if isinstance(given, Backend):
        return given
    inner = getattr(given, "endpoint", None)  # a Runtime
    if isinstance(inner, Backend):
        return inner
    if not hasattr(given, "async_generate"):
        raise SettingsError(f"{type(given).__name__} is not a back end; give an Engine, RuntimeEndpoint, OpenAI …")
    if given not in _wrapped:
        _wrapped[given] = EngineBackend(given)
    return _wrapped[given]


def flush_cache(backend: Any = None) -> bool:
    """Forgets all cached prefixes; False, and nothing happens, while requests run."""
    return as_backend(backend).flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """Settings, limits and load of the back end."""
    return as_backend(backend).get_server_info()
