"""Stepping through compiled grammars: a small vocabulary, acceptance of whole texts, random walks over masks."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt

from bough.constrained.backends import Backend, load_backend
from bough.constrained.interface import GrammarSpec, Matcher
from bough.constrained.prepare import prepare
from bough.constrained.vocabulary import Vocabulary

STOP = 256
MERGED = (
    b'{"',
    b'": ',
    b'", "',
    b'"}',
    b", ",
    b": ",
    b"ab",
    b"12",
    b"true",
    b"null",
    b'": "',
    b"\xc3\xa9",
    b"\n\n",
    b"</",
)
BYTES = Vocabulary((*(bytes([i]) for i in range(256)), b"", *MERGED, b""), (STOP,))
BACKEND_NAMES = ("xgrammar", "llguidance", "outlines-core")


@cache
def backend_of(name: str) -> Backend:
    return load_backend(name, BYTES)


@lru_cache(32)
def compiled(spec: GrammarSpec, name: str) -> Callable[[], Matcher]:
    prepared = prepare(spec, name)
    backend = backend_of(prepared.backend)
    return backend.load(prepared.spec, backend.compile(prepared.spec))


def matcher_of(spec: GrammarSpec, name: str) -> Matcher:
    """A matcher, compiled here and now; `RequestError` where the spec is refused."""
    return compiled(spec, name)()


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether the whole text is allowed; the matcher is left where it was."""
    taken, fits = 0, True
    for byte in text.encode():
        if not matcher.accept(byte):
            fits = False
            break
        taken += 1
    ended = fits and matcher.can_end
    matcher.rollback(taken)
    return ended


def random_text(matcher: Matcher, rng: random.Random, most: int = 600, eager: float = 0.5) -> bytes | None:
    """What a sampler with random logits says: bytes up to a stop token, or None if it has not ended by `most` tokens.

    Where the text may end, it does so with the probability `eager`; where it need not, structure is preferred, so that
    strings and lists come to an end.
    """
    mask = np.zeros(BYTES.mask_words, np.int32)
    said = b""
    for _ in range(most):
        matcher.fill(mask)
        allowed = [int(token) for token in allowed_tokens(mask)]
        assert allowed, f"nothing is allowed after {said!r}"
        if STOP in allowed and (len(allowed) == 1 or rng.random() < eager):
            assert matcher.accept(STOP) and matcher.finished
            return said
        choices = [token for token in allowed if token != STOP]
        closing = [token for token in choices if BYTES.pieces[token] in (b'"', b"}", b"]", b'"}')]
        token = rng.choice(closing if closing and rng.random() < 0.4 else choices)
        assert matcher.accept(token), f"token {token} was allowed after {said!r} and is not accepted"
        said += BYTES.pieces[token]
    return None


def allowed_tokens(mask: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
