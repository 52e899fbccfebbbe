"""Jump-forward: text that a grammar forces is appended without being sampled, and computed in one step.

Works with a step in flight. The forced tokens are found when step t is committed, while step t + 1 is running with the
last sampled token. They are laid down behind that token, or in its place where the tokenizer would have merged the two,
and the row goes on like a prompt that has just begun: what step t + 1 samples for it is dropped, and the next plan
computes the forced tokens as a chunk, which samples at its end. So executors know nothing of all this, and chunks,
retraction and the radix tree work with forced tokens as with any others. What a grammar forces at its beginning is
computed with the prompt, and where it can only end, the end is not sampled either.

Owns nothing: tokens and pages belong to `Residents`, the grammar's state to the request's `Constraint`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bough.core.plan import mask_words
from bough.scheduler.ports import Grammars
from bough.scheduler.request import Request
from bough.scheduler.residents import Residents

WORTHWHILE = 2  # forced tokens: the step in flight is lost, so a single one would come as early by itself


class JumpForward:
    """Lays forced tokens down."""

    def __init__(self, residents: Residents, grammars: Grammars, eos_ids: Sequence[int], vocab_size: int) -> None:
        self._residents = residents
        self._table = residents.table
        self._grammars = grammars
        self._eos_ids = sorted(eos_ids)
        self._mask = np.zeros(mask_words(vocab_size), dtype=np.int32)

    def begin(self, request: Request) -> None:
        """Lays what an answer must begin with behind the prompt of a request that is about to wait. Its logprobs would
        be mixed up with the prompt's, so a request that wants some begins by sampling. A resumed one has begun."""
        constraint = request.constraint
        if constraint is None or request.logprobs is not None or request.generated:
            return
        forced = constraint.forced_first()
        tokens = self._grammars.spell(None, forced) if forced else ()
        # Something must be left to sample: that is when the client learns of them.
        if not 0 < len(tokens) < request.max_new or not request.stop_ids.isdisjoint(tokens):
            return
        if constraint.extend(tokens):
            request.tokens = np.concatenate([request.tokens, np.array(tokens, dtype=np.int32)])
            request.untold = len(tokens)

    def after(self, request: Request, last: int) -> None:
        """Appends what must follow the `last` token, which was just sampled and is not the end."""
        generated = int(self._table.known[request.row]) - request.prompt_len
        if generated < request.max_new and not self._jump(request, last):
            self._end(request)

    def _end(self, request: Request) -> None:
        """Ends the text of a request where nothing else could come. The end would have a logprob, so a request that
        wants some samples it."""
        table, row = self._table, request.row
        assert request.constraint is not None
        if request.logprobs is None and request.constraint.must_end(self._mask):
            table.tokens[row, table.known[row]] = self._eos_ids[0]
            table.known[row] += 1

    def _jump(self, request: Request, last: int) -> bool:
        """Lays forced tokens down; False when there are none, or they are not worth the trouble."""
        constraint, table, row = request.constraint, self._table, request.row
        assert constraint is not None
        forced = constraint.forced()
        if not forced:
            return False
        first = int(table.known[row]) - 1
        room = request.max_new - (first - request.prompt_len)
        tokens = _until_stop(self._grammars.spell(last, forced)[:room], request.stop_ids)
        if len(tokens) <= WORTHWHILE:
            return False
        ends = len(tokens) == room or tokens[-1] in request.stop_ids
        if ends and request.logprobs is not None:  # an ending is not computed any more, so nothing would score it
            return False
        if not constraint.replace(last, tokens):
            return False
        table.tokens[row, first : first + len(tokens)] = tokens
        table.known[row] = first + len(tokens)
        kept = first + (tokens[0] == last)
        if ends:  # what a step in flight computes for a token that was replaced must not get into the tree
            table.length[row] = min(kept, int(table.length[row]))
        else:
            self._go_on_behind(request, kept)
        return True

    def _go_on_behind(self, request: Request, kept: int) -> None:
        """Has everything behind the row's first `kept` tokens computed, and scored where that was asked."""
        table, row = self._table, request.row
        if request.logprobs is not None:
            kept -= 1  # the token before tells of the first forced one
            request.logprob_next, request.logprob_end = kept, int(table.known[row]) - 1
        self._residents.rewind(request, min(kept, int(table.length[row])))


def _until_stop(tokens: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """The tokens up to the first that ends the text."""
    for count, token in enumerate(tokens, 1):
        if token in stop_ids:
            return list(tokens[:count])
    return list(tokens)
