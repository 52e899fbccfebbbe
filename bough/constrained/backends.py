"""The back ends by name, and what is asked of one. A library is imported when its back end is first chosen."""

import importlib
from collections.abc import Callable
from typing import Protocol

from bough.constrained.interface import GrammarSpec, Matcher
from bough.constrained.vocabulary import Vocabulary
from bough.core.errors import RequestError, SettingsError

PATHS = {
    "xgrammar": "bough.constrained.xgrammar_backend:XGrammarBackend",
    "llguidance": "bough.constrained.llguidance_backend:LLGuidanceBackend",
    "outlines-core": "bough.constrained.outlines_backend:OutlinesBackend",
}
ALIASES = {"outlines": "outlines-core"}


class Backend(Protocol):
    """One library over one vocabulary. Safe to call from several threads."""

    def compile(self, spec: GrammarSpec) -> bytes:
        """The work of compiling, in a form that crosses processes; empty where `load` does it again as quickly. A
        `RequestError` when the library refuses."""

    def load(self, spec: GrammarSpec, compiled: bytes = b"") -> Callable[[], Matcher]:
        """What makes a matcher for each request, from what `compile` gave or, without that, from the spec."""


def resolve_backend(name: str) -> str:
    """The back end's own name for what a user wrote."""
    resolved = ALIASES.get(name, name)
    if resolved not in PATHS:
        raise SettingsError(f"--grammar-backend {name!r} is not known; choose one of: {', '.join([*PATHS, *ALIASES])}.")
    return resolved


def load_backend(name: str, vocabulary: Vocabulary) -> Backend:
    """Imports the library and gives it the vocabulary; the first grammar of an engine pays for it."""
    module, _, attribute = PATHS[resolve_backend(name)].partition(":")
    try:
        make: Callable[[Vocabulary], Backend] = getattr(importlib.import_module(module), attribute)
    except ImportError as error:
        text = f"--grammar-backend {name} needs a package that cannot be imported ({error}); `pip install {name}`."
        raise SettingsError(text) from None
    return make(vocabulary)


def refusal(error: object, field: str | None = None) -> RequestError:
    """A library's complaint as an answer to the client: its first line, without the place in the library's source."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else "no reason given"
    if line.startswith("[") and ": " in line:  # "[12:00:00] /project/cpp/file.cc:83: what is wrong"
        line = line.partition("] ")[2].partition(": ")[2] or line
    return RequestError(f"The grammar cannot be compiled: {line.rstrip('.')[:500]}.", field=field)
