"""Where the engine gets its compiler of grammars from."""

from __future__ import annotations

from bough.constrained.backends import resolve_backend
from bough.constrained.compiler import CachingCompiler
from bough.constrained.interface import GrammarCompiler
from bough.constrained.vocabulary import Vocabulary
from bough.core.errors import SettingsError

__all__ = ["build_compiler", "resolve_backend"]


def build_compiler(
    backend: str, vocabulary: Vocabulary, timeout_s: float = 10.0, *, workers: int = 2, cache_entries: int = 512
) -> GrammarCompiler:
    """A compiler over one vocabulary. Nothing is loaded or started before the first grammar is asked for."""
    if not vocabulary.stop_ids:
        raise SettingsError("Structured output needs a tokenizer that names the token which ends a text.")
    return CachingCompiler(backend, vocabulary, timeout_s, workers, cache_entries)
