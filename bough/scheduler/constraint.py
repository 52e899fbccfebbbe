"""One request's grammar and where the request stands in it.

Owns the matcher. It says what may be sampled next, steps over what was, and settles the questions that a grammar alone
leaves open: stop tokens are kept away until `min_new_tokens` and, with `ignore_eos`, as long as anything else may come;
but a text that can only end does end, because nothing could follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from bough.constrained.interface import Compiled
from bough.core.finish import FinishAbort
from bough.core.plan import IntArray
from bough.core.sampling_params import SamplingParams

DEAD_END = FinishAbort(
    "The grammar allows no token of this model's vocabulary here; other requests go on.",
    status_code=500,
    err_type="InternalServerError",
)
STRAYED = FinishAbort(
    "A token was sampled that the grammar does not allow; other requests go on. This is a defect in Bough, please "
    "report it.",
    status_code=500,
    err_type="InternalServerError",
)


class Constraint:
    """Lives as long as its request, through retractions too: it has stepped over exactly the tokens that are known."""

    def __init__(
        self, compiled: Compiled, sampling: SamplingParams, stop_ids: Iterable[int], eos_ids: Sequence[int]
    ) -> None:
        self._matcher = compiled.matcher()
        self.warnings = compiled.warnings
        self._min_new = sampling.min_new_tokens
        self._early = tuple({*stop_ids, *eos_ids})  # held back until min_new_tokens
        self._ignored = tuple(eos_ids) if sampling.ignore_eos else ()  # held back throughout
        self.dead_end = False  # nothing was allowed when it was last asked

    def allow(self, words: IntArray, generated: int) -> None:
        """Writes what may be sampled as output token number `generated`, counted from 0."""
        self._matcher.fill(words)
        held_back = self._early if generated < self._min_new else self._ignored
        if held_back:
            others = words.copy()
            _clear(others, held_back)
            if others.any():
                words[:] = others
        self.dead_end = not words.any()

    def accept(self, token: int) -> bool:
        """Steps over a sampled token; False, and it stands where it stood, when the grammar does not allow it."""
        return self._matcher.accept(token)

    def forced(self) -> bytes:
        """What must come next, whatever is sampled."""
        return b"" if self._matcher.finished else self._matcher.forced()

    def replace(self, last: int, tokens: Sequence[int]) -> bool:
        """Takes the last token back and steps over `tokens` in its place. False, and nothing has changed, when the
        grammar refuses one of them."""
        self._matcher.rollback(1)
        for count, token in enumerate(tokens):
            if not self._matcher.accept(token):
                self._matcher.rollback(count)
                self._matcher.accept(last)
                return False
        return True


def _clear(words: IntArray, tokens: Sequence[int]) -> None:
    """Forbids these tokens; there are a handful of them."""
    bits = words.view(np.uint32)
    for token in tokens:
        if token < 32 * len(words):
            bits[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
