"""Masks by llguidance: an Earley parser over derivatives of regular expressions.

Compiles take milliseconds and a mask tens to hundreds of microseconds; the library limits both. A grammar that meets a
limit while generating is refused there, for its request alone.
"""

from collections.abc import Callable

import llguidance
import numpy as np
import numpy.typing as npt

from bough.constrained.backends import refusal
from bough.constrained.interface import GrammarSpec, Matcher
from bough.constrained.vocabulary import Vocabulary, allow_also, allow_only
from bough.core.errors import RequestError


class LLGuidanceBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_LibraryVocabulary(vocabulary)))

    def compile(self, spec: GrammarSpec) -> bytes:
        check_grammar(spec)
        return b""

    def load(self, spec: GrammarSpec, compiled: bytes = b"") -> Callable[[], Matcher]:
        first = llguidance.LLMatcher(self._tokenizer, _grammar(spec.text), log_level=0)
        if first.is_error():
            raise refusal(first.get_error())
        return lambda: LLGuidanceMatcher(first.deep_copy(), self._vocabulary)


def check_grammar(spec: GrammarSpec) -> None:
    """Raises if the library does not take a grammar; that needs no vocabulary."""
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(_grammar(spec.text))
    if failed:
        raise refusal(messages[0])


def _grammar(text: str) -> str:
    """`no_forcing`: the library would narrow masks to its own tokens for forced text; the engine knows the model's
    tokenizer."""
    return llguidance.LLMatcher.grammar_from_lark('%llguidance {"no_forcing": true}\n' + text)


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
