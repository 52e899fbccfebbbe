"""Masks by xgrammar: a pushdown automaton whose masks are mostly worked out when the grammar is compiled.

Its masks are the cheapest of the three (microseconds) and its compiles the dearest (up to seconds). A serialised
grammar can be a hundred times what it holds, so only what took long to compile crosses processes in that form.
"""

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xgrammar

from bough.constrained.backends import refusal
from bough.constrained.interface import GrammarSpec, Matcher
from bough.constrained.vocabulary import Vocabulary

COMPILE_THREADS = 2  # a compile shares the machine with the model
QUICK_S = 4.0  # of computing, on all threads: what took no longer may be compiled once more


class XGrammarBackend:
    """The library's compiler over one vocabulary, without a cache of its own: `compiler.py` has one for all."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary.pieces), vocab_size=vocabulary.size, stop_token_ids=list(vocabulary.stop_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=COMPILE_THREADS, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> bytes:
        began = time.process_time()
        compiled = self._compile(spec)
        return b"" if time.process_time() - began < QUICK_S else compiled.serialize_json().encode()

    def load(self, spec: GrammarSpec, compiled: bytes = b"") -> Callable[[], Matcher]:
        if compiled:
            grammar = xgrammar.CompiledGrammar.deserialize_json(compiled.decode(), self._info)
        else:
            grammar = self._compile(spec)
        return lambda: XGrammarMatcher(grammar, self._vocabulary)

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        try:
            match spec.kind:
                case "regex":
                    return self._compiler.compile_regex(spec.text)
                case "structural_tag":
                    return self._compiler.compile_structural_tag(spec.text)
            return self._compiler.compile_grammar(spec.text)
        except (RuntimeError, ValueError) as error:
            raise refusal(error) from None


class XGrammarMatcher(Matcher):
    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary.stop_ids)
        self._inner = xgrammar.GrammarMatcher(compiled)
        self._tail = np.uint32(0xFFFFFFFF >> (-vocabulary.size % 32))  # bits of the last word that stand for tokens

    @property
    def can_end(self) -> bool:
        return not self.finished and bool(self._inner.is_completed())

    def _forced(self) -> bytes:
        try:
            return str(self._inner.find_jump_forward_string()).encode()
        except UnicodeDecodeError as error:  # it ends inside a character, where there is a choice again
            whole: bytes = error.object[: error.start]
            return whole

    def _step(self, token: int) -> bool:
        return bool(self._inner.accept_token(token))

    def _step_back(self, tokens: int) -> None:
        self._inner.rollback(tokens)

    def _fill(self, mask: npt.NDArray[np.int32]) -> None:
        self._inner.fill_next_token_bitmask(mask.reshape(1, -1))
        mask.view(np.uint32)[-1] &= self._tail  # the library leaves the bits behind the last token set
