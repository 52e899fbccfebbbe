"""Masks by llguidance: an Earley parser over derivatives of regular expressions.

Compiles take milliseconds and a mask tens to hundreds of microseconds; the library limits both. A grammar that meets a
limit while generating is refused there, for its request alone. The library does not limit the first row of its parser,
which it computes while it holds the interpreter: `check_grammar` tries that in a process that can be ended.
"""

import functools
import time
from collections.abc import Callable

import llguidance
import numpy as np
import numpy.typing as npt

from bough.constrained.backends import refusal
from bough.constrained.interface import GrammarSpec, Matcher
from bough.constrained.vocabulary import Vocabulary, allow_also, allow_only
from bough.core.errors import RequestError

MOST_FIRST_S = 0.1  # of computing for the first row; later ones take less, because the library limits them
# Of one mask: a fifth of the library's own limit, with which a mask of an ambiguous grammar takes seconds.
LIMITS = llguidance.LLParserLimits(step_max_items=10_000)


class LLGuidanceBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_LibraryVocabulary(vocabulary)))

    def compile(self, spec: GrammarSpec) -> bytes:
        check_grammar(spec)
        return b""

    def load(self, spec: GrammarSpec, compiled: bytes = b"") -> Callable[[], Matcher]:
        first = _matcher(self._tokenizer, spec)
        return lambda: LLGuidanceMatcher(first.deep_copy(), self._vocabulary)


def check_grammar(spec: GrammarSpec) -> None:
    """Raises if the library does not take a grammar, or takes long to begin with it; that needs no vocabulary."""
    matcher = _matcher(_byte_tokenizer(), spec)
    began = time.thread_time()
    matcher.compute_bitmask()
    if matcher.is_error() or time.thread_time() - began > MOST_FIRST_S:
        raise RequestError("The grammar is too ambiguous: its beginning can be read in too many ways; make it smaller.")


def _matcher(tokenizer: llguidance.LLTokenizer, spec: GrammarSpec) -> llguidance.LLMatcher:
    """`no_forcing`: the library would narrow masks to its own tokens for forced text; the engine knows the model's
    tokenizer."""
    grammar = llguidance.LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + spec.text)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise refusal(matcher.get_error())
    return matcher


@functools.cache
def _byte_tokenizer() -> llguidance.LLTokenizer:
    pieces = tuple(bytes([value]) for value in range(256))
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_LibraryVocabulary(Vocabulary((*pieces, b""), (256,)))))


class _LibraryVocabulary:
    """What the library reads of a tokenizer. It is never asked to tokenise: the engine does so with forced text."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.stop_ids[0]
        self.tokens = [piece or f"<|{token}|>".encode() for token, piece in enumerate(vocabulary.pieces)]
        self.special_token_ids = [token for token, piece in enumerate(vocabulary.pieces) if not piece]

    def __call__(self, text: bytes) -> list[int]:
        return []


class LLGuidanceMatcher(Matcher):
    def __init__(self, inner: llguidance.LLMatcher, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary.stop_ids)
        self._inner = inner

    @property
    def can_end(self) -> bool:
        return not self.finished and bool(self._inner.is_accepting())

    def _forced(self) -> bytes:
        return b"" if self._inner.is_accepting() else bytes(self._inner.compute_ff_bytes())

    def _step(self, token: int) -> bool:
        return self._inner.validate_tokens([token]) == 1 and bool(self._inner.consume_token(token))

    def _step_back(self, tokens: int) -> None:
        self._inner.rollback(tokens)

    def _fill(self, mask: npt.NDArray[np.int32]) -> None:
        self._require_no_error()  # it may have met a limit on the way here, and then counts as stopped
        if self._inner.is_stopped():
            allow_only(self._stops, mask)
            return
        self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._require_no_error()
        if self._inner.is_accepting():
            allow_also(self._stops, mask)

    def _require_no_error(self) -> None:
        if self._inner.is_error():
            reason = str(self._inner.get_error()).partition("\n")[0]
            raise RequestError(f"The grammar cannot be followed any further: {reason}.")
