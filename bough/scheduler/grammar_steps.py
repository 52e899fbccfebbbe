"""The constrained rows of a step: what they may sample, and where their grammars stand after they did.

The loop launches step t + 1, commits step t (which steps the grammars over its tokens, here) and only then asks for the
masks of step t + 1. Rows without a grammar cost nothing. A row whose mask is late, or whose token its grammar does not
take, gets no token from the step: it goes back by one and samples again, in the late case when its mask is there. Owns
no state: each request's grammar is its own.
"""

from __future__ import annotations

import time

import numpy as np

from bough.core.finish import FinishAbort
from bough.core.plan import BoolArray, IntArray, TokenMasks, mask_words
from bough.scheduler.assembly import PlannedStep
from bough.scheduler.jump_forward import JumpForward
from bough.scheduler.mask_work import PATIENCE_S
from bough.scheduler.request import Request
from bough.scheduler.residents import Residents
from bough.scheduler.rows import RowIndex

NO_TOKEN = -1


class GrammarSteps:
    """Walks the grammars of all rows. Without `jump_forward`, forced tokens are sampled like others."""

    def __init__(self, residents: Residents, vocab_size: int, jump_forward: JumpForward | None) -> None:
        self._residents = residents
        self._table = residents.table
        self._words = mask_words(vocab_size)
        self._jump_forward = jump_forward

    def release(self) -> bool:
        """Lets the rows go on whose masks have come. True when others are still held."""
        table = self._table
        held = table.held.nonzero()[0].tolist()
        for row in held:
            constraint = table.request_in(row).constraint
            assert constraint is not None
            table.held[row] = constraint.awaits_mask
        return any(table.held[row] for row in held)

    def masks(self, step: PlannedStep) -> TokenMasks:
        """For the masked rows of the oldest step in flight: all tokens before it are known. Whoever has ended or jumped
        meanwhile, or is late, may sample anything, because nobody will look."""
        table, plan = self._table, step.plan
        deadline = time.monotonic() + PATIENCE_S
        assert plan.masked is not None
        places = np.flatnonzero(plan.masked)
        words = np.full((len(places), self._words), -1, dtype=np.int32)
        for line, place in zip(words, places.tolist(), strict=True):
            row = int(plan.rows[place])
            if table.serial[row] == step.serials[place]:
                request = table.request_in(row)
                assert request.constraint is not None
                request.constraint.allow(line, int(table.known[row]) - request.prompt_len, deadline)
        return TokenMasks(words)

    def advance(self, rows: RowIndex, tokens: IntArray, bad: BoolArray) -> dict[int, FinishAbort]:
        """Steps over the sampled tokens, and over what they make inevitable: `tokens` becomes each row's last one, or
        `NO_TOKEN` where none stands. By place in `rows`, the requests that cannot go on."""
        table = self._table
        failed: dict[int, FinishAbort] = {}
        for place in table.constrained[rows].nonzero()[0].tolist():
            request = table.request_in(int(rows[place]))
            constraint = request.constraint
            assert constraint is not None
            token = int(tokens[place])
            if bad[place]:
                if constraint.dead_end is not None:
                    failed[place] = constraint.dead_end
            elif constraint.late or not constraint.accept(token):
                self._take_back(request, held=constraint.late)
                tokens[place] = NO_TOKEN
                continue
            elif self._jump_forward is not None and token not in request.stop_ids:
                self._jump_forward.after(request, token)
            tokens[place] = table.tokens[request.row, table.known[request.row] - 1]
        return failed

    def _take_back(self, request: Request, *, held: bool) -> None:
        """The row has not got the token that it just sampled; the one before it is computed again, to sample anew."""
        table, row = self._table, request.row
        table.held[row] = held
        table.known[row] -= 1
        self._residents.rewind(request, min(int(table.known[row]) - 1, int(table.length[row])))
