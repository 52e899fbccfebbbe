"""The constrained rows of a step: what they may sample, and where their grammars stand after they did.

The loop launches step t + 1, commits step t (which steps the grammars over its tokens, here) and only then asks for the
masks of step t + 1. Rows without a grammar cost nothing. Owns no state: each request's grammar is its own.
"""

from __future__ import annotations

import numpy as np

from bough.core.finish import FinishAbort
from bough.core.plan import BoolArray, IntArray, TokenMasks, mask_words
from bough.scheduler.assembly import PlannedStep
from bough.scheduler.constraint import STRAYED
from bough.scheduler.jump_forward import JumpForward
from bough.scheduler.request import Request
from bough.scheduler.rows import RowTable


class GrammarSteps:
    """Walks the grammars of all rows. Without `jump_forward`, forced tokens are sampled like others."""

    def __init__(self, table: RowTable, vocab_size: int, jump_forward: JumpForward | None) -> None:
        self._table = table
        self._words = mask_words(vocab_size)
        self._jump_forward = jump_forward

    def masks(self, step: PlannedStep) -> TokenMasks:
        """For the masked rows of the oldest step in flight: all tokens before it are known. Whoever has ended or jumped
        meanwhile may sample anything, because nobody will look."""
        table, plan = self._table, step.plan
        assert plan.masked is not None
        places = np.flatnonzero(plan.masked)
        words = np.full((len(places), self._words), -1, dtype=np.int32)
        for line, place in zip(words, places.tolist(), strict=True):
            row = int(plan.rows[place])
            if table.serial[row] == step.serials[place]:
                request = table.request_in(row)
                assert request.constraint is not None
                request.constraint.allow(line, int(table.known[row]) - request.prompt_len)
        return TokenMasks(words)

    def advance(self, rows: IntArray, tokens: IntArray, bad: BoolArray) -> dict[int, FinishAbort]:
        """Steps over the sampled tokens, and over what they make inevitable: `tokens` becomes each row's last one. By
        place in `rows`, the requests that cannot go on."""
        failed: dict[int, FinishAbort] = {}
        for place in np.flatnonzero(self._table.constrained[rows]).tolist():
            request = self._table.request_in(int(rows[place]))
            reason = self._step(request, int(tokens[place]), bool(bad[place]))
            if reason is not None:
                failed[place] = reason
            tokens[place] = self._table.tokens[request.row, self._table.known[request.row] - 1]
        return failed

    def _step(self, request: Request, token: int, bad: bool) -> FinishAbort | None:
        constraint = request.constraint
        assert constraint is not None
        if bad:
            return constraint.dead_end
        if not constraint.accept(token):
            return STRAYED
        if self._jump_forward is not None and token not in request.stop_ids:
            self._jump_forward.after(request, token)
        return None
