"""The scheduler's way to grammars: a compiler over the model's vocabulary, made when the first grammar is asked for.

Owns the thread that reads the tokenizer and builds the compiler, the requests that came before it was done, and the
memory of how forced texts are spelt. An engine that never sees a grammar pays nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from bough.core.errors import BoughError, RequestError
from bough.core.settings import SchedulerSettings

if TYPE_CHECKING:
    from bough.constrained.compiler import CachingCompiler
    from bough.constrained.interface import Compiled, GrammarSpec, Ticket
    from bough.constrained.vocabulary import Vocabulary
    from bough.tokenizer.tokenizer import Tokenizer

log = logging.getLogger(__name__)

NO_BACKEND = "none"
SPELLINGS = 4096  # forced texts whose tokens are remembered: the keys of a schema come again with every answer


class EarlyTicket:
    """A compile that was asked for before there was a compiler. All of it happens on the scheduler's thread."""

    def __init__(self, desk: GrammarDesk, spec: GrammarSpec) -> None:
        self._desk = desk
        self._spec = spec
        self._ticket: Ticket | None = None

    @property
    def done(self) -> bool:
        if self._ticket is None and self._desk.ready and self._desk.error is None:
            self._ticket = self._desk.request(self._spec)
        return self._desk.error is not None or (self._ticket is not None and self._ticket.done)

    def result(self) -> Compiled:
        if self._ticket is None:
            raise RequestError(f"This engine cannot follow a grammar: {self._desk.error}")
        return self._ticket.result()

    def cancel(self) -> None:
        if self._ticket is not None:
            self._ticket.cancel()


class GrammarDesk:
    """Takes grammars in from the first moment on; `open_tokenizer` is called once, on a thread."""

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
        self._builder: threading.Thread | None = None
        self._spell: Callable[[int | None, bytes, bool], Sequence[int]] | None = None
        self.error: Exception | None = None  # why there will be no compiler

    @property
    def ready(self) -> bool:
        return self._compiler is not None or self.error is not None

    def request(self, spec: GrammarSpec) -> Ticket:
        if self._settings.grammar_backend == NO_BACKEND:
            text = "This server follows no grammars (--grammar-backend none); ask for an answer of any form."
            raise RequestError(text, field="choices" if spec.kind == "choice" else spec.kind)
        if self._compiler is not None:
            return self._compiler.request(spec)
        if self._builder is None:
            self._builder = threading.Thread(target=self._build, name="grammars", daemon=True)
            self._builder.start()
        return EarlyTicket(self, spec)

    def spell(self, last: int | None, forced: bytes, *, whole: bool = False) -> Sequence[int]:
        assert self._spell is not None, "nothing is forced before a grammar has been compiled"
        return self._spell(last, forced, whole)

    def close(self) -> None:
        if self._builder is not None:
            self._builder.join()
        if self._compiler is not None:
            self._compiler.close()

    def _build(self) -> None:
        from bough.constrained.compiler import CachingCompiler
        from bough.constrained.spelling import spell

        try:
            tokenizer = self._open_tokenizer()
            assert tokenizer is not None
            vocabulary = read_vocabulary(tokenizer, self._eos_ids, self._vocab_size)
            compiler = CachingCompiler(self._settings.grammar_backend, vocabulary, self._settings.grammar_timeout_s)
        except Exception as error:  # whatever it is, those who wait must learn of it
            if not isinstance(error, BoughError):
                log.exception("grammars cannot be compiled")
            self.error = error
            return
        encode = partial(tokenizer.encode, add_special_tokens=False)
        self._spell = lru_cache(SPELLINGS)(partial(spell, encode, vocabulary.pieces.__getitem__))
        self._compiler = compiler


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
