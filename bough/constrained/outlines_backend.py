"""Masks by outlines-core: a finite automaton over tokens, worked out when the grammar is compiled.

It knows regular expressions only; `prepare` gives the rest to llguidance. A compile may take minutes, so it runs in a
process that can be ended. A state's mask is made once and shared.
"""

from collections.abc import Callable
from functools import cache
from os.path import commonprefix

import numpy as np
import numpy.typing as npt
import outlines_core

from bough.constrained.backends import refusal
from bough.constrained.interface import GrammarSpec, Matcher
from bough.constrained.vocabulary import Vocabulary, allow_also

MAX_FORCED_BYTES = 4096
END = b"\x00"


class OutlinesBackend:
    """The library loses ways on from a place where a text may end (of `a(bc)?`, the `b`). So every pattern ends with
    NUL, which stands for the stop token, and which no other token may contain."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        tokens: dict[bytes, list[int]] = {}
        for token, piece in enumerate(vocabulary.pieces):
            if piece and END not in piece:
                tokens.setdefault(piece, []).append(token)
        tokens[END] = [vocabulary.stop_ids[0]]
        self._tokens = outlines_core.Vocabulary(vocabulary.size, tokens)

    def compile(self, spec: GrammarSpec) -> bytes:
        try:
            index = outlines_core.Index(f"(?:{spec.text})\\x00", self._tokens)
        except (ValueError, RuntimeError, TypeError) as error:
            raise refusal(error) from None
        return bytes(index.__reduce__()[1][0])

    def load(self, spec: GrammarSpec, compiled: bytes = b"") -> Callable[[], Matcher]:
        states = States(outlines_core.Index.from_binary(compiled or self.compile(spec)), self._vocabulary)
        return lambda: OutlinesMatcher(states)


class States:
    """The automaton of one grammar, with the masks and forced texts of the states that were visited."""

    def __init__(self, index: outlines_core.Index, vocabulary: Vocabulary) -> None:
        self.index = index
        self.vocabulary = vocabulary
        self.mask, self.forced = cache(self._mask), cache(self._forced)

    def ends(self, state: int) -> bool:
        ended = self.index.get_next_state(state, self.vocabulary.stop_ids[0])
        return ended is not None and bool(self.index.is_final_state(ended))

    def _mask(self, state: int) -> npt.NDArray[np.int32]:
        bits = np.zeros(self.vocabulary.mask_words * 32, np.uint8)
        bits[self._next_tokens(state)] = 1
        found = np.packbits(bits, bitorder="little").view(np.int32)
        if self.ends(state):
            allow_also(self.vocabulary.stop_ids, found)
        return found

    def _forced(self, state: int) -> bytes:
        """What every way on from a state begins with: the common start of its tokens, while that is a token itself."""
        found = b""
        while len(found) < MAX_FORCED_BYTES and not self.ends(state):
            tokens = self._next_tokens(state)
            pieces = [self.vocabulary.pieces[token] for token in tokens]
            common = commonprefix(pieces) or b""  # noqa: RUF071  # not of paths
            step = next((token for token, piece in zip(tokens, pieces, strict=True) if piece == common), None)
            found += common
            if step is None or not common:
                break
            state = self.index.get_next_state(state, step)
        return found

    def _next_tokens(self, state: int) -> list[int]:
        tokens = self.index.get_allowed_tokens(state) or []
        return [token for token in tokens if token < self.vocabulary.size and token not in self.vocabulary.stop_ids]


class OutlinesMatcher(Matcher):
    def __init__(self, states: States) -> None:
        super().__init__(states.vocabulary.stop_ids)
        self._states = states
        self._passed: list[int] = [states.index.get_initial_state()]

    @property
    def can_end(self) -> bool:
        return not self.finished and self._states.ends(self._passed[-1])

    def _forced(self) -> bytes:
        return self._states.forced(self._passed[-1])

    def _step(self, token: int) -> bool:
        state = self._states.index.get_next_state(self._passed[-1], token)
        if state is None:
            return False
        self._passed.append(state)
        return True

    def _step_back(self, tokens: int) -> None:
        del self._passed[-tokens:]

    def _fill(self, mask: npt.NDArray[np.int32]) -> None:
        mask[:] = self._states.mask(self._passed[-1])
