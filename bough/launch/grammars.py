"""The scheduler's way to grammars: a compiler over the model's vocabulary, made when the first grammar is asked for.

Owns the memory of how forced texts are spelt. An engine that never sees a grammar starts no compiler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from importlib import import_module
from threading import Thread
from typing import TYPE_CHECKING

from bough.core.errors import BoughError, RequestError, SettingsError
from bough.core.settings import SchedulerSettings

if TYPE_CHECKING:
    from bough.constrained.compiler import CachingCompiler
    from bough.constrained.interface import GrammarSpec, Ticket
    from bough.constrained.vocabulary import Vocabulary
    from bough.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NO_BACKEND = "none"
SPELLINGS = 4096  # forced texts whose tokens are remembered: the keys of a schema come again with every answer


class GrammarDesk:
    """Takes grammars in from the first moment on; `open_tokenizer` is called once, on a thread of the compiler's."""

    def __init__(
        self,
        open_tokenizer: Callable[[], Tokenizer | None],
        eos_ids: Sequence[int],
        vocab_size: int,
        settings: SchedulerSettings,
    ) -> None:
        self._open_tokenizer = open_tokenizer
        self._eos_ids = tuple(eos_ids)
        self._vocab_size = vocab_size
        self._settings = settings
        self._compiler: CachingCompiler | None = None
        self._spell: Callable[[int | None, bytes, bool], Sequence[int]] | None = None
        if settings.grammar_backend != NO_BACKEND:  # before it is asked for: an import would hold up a step
            Thread(target=import_module, args=("bough.constrained.compiler",), daemon=True).start()

    def request(self, spec: GrammarSpec) -> Ticket:
        settings = self._settings
        if settings.grammar_backend == NO_BACKEND:
            text = "This server follows no grammars (--grammar-backend none); ask for an answer of any form."
            raise RequestError(text, field="choices" if spec.kind == "choice" else spec.kind)
        if self._compiler is None:
            from bough.constrained.compiler import CachingCompiler

            self._compiler = CachingCompiler(settings.grammar_backend, self._read, settings.grammar_timeout_s)
        return self._compiler.request(spec)

    def spell(self, last: int | None, forced: bytes, *, whole: bool = False) -> Sequence[int]:
        assert self._spell is not None, "nothing is forced before a grammar has been compiled"
        return self._spell(last, forced, whole)

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()

    def _read(self) -> Vocabulary:
        from bough.constrained.spelling import spell

        try:
            tokenizer = self._open_tokenizer()
            assert tokenizer is not None
            vocabulary = read_vocabulary(tokenizer, self._eos_ids, self._vocab_size)
            if not vocabulary.stop_ids:
                raise SettingsError("Structured output needs a tokenizer that names the token which ends a text.")
        except Exception as error:  # whatever it is, those who wait must learn of it
            if not isinstance(error, BoughError):
                log.exception("grammars cannot be compiled")
            raise RequestError(f"This engine cannot follow a grammar: {error}") from error
        encode = partial(tokenizer.encode, add_special_tokens=False)
        self._spell = lru_cache(SPELLINGS)(partial(spell, encode, vocabulary.pieces.__getitem__))
        return vocabulary


def read_vocabulary(tokenizer: Tokenizer, stop_ids: Iterable[int], size: int | None = None) -> Vocabulary:
    """The vocabulary of a tokenizer, widened to `size` where the model's logits are wider than the tokenizer."""
    from bough.constrained.vocabulary import Vocabulary

    stops = tuple(sorted({int(token) for token in stop_ids}))
    hidden = {*tokenizer.special_ids, *stops}
    width = max(size or 0, tokenizer.vocab_size)
    table = tokenizer.pieces(skip_special_tokens=False)

    def piece(token: int) -> bytes:
        if token in hidden or token >= tokenizer.vocab_size:
            return b""
        found = table[token] if table is not None else tokenizer.token_text(token)
        return found if isinstance(found, bytes) else found.encode()

    return Vocabulary(tuple(map(piece, range(width))), stops)
