"""Jump-forward: text that a grammar forces is appended without being sampled, and computed in one step.

The forced tokens are found when step t is committed, while step t + 1 is running. They are written behind the last
sampled token, or in its place where the tokenizer would have merged the two. The row then goes on like a prompt: what
step t + 1 samples for it is dropped, and the next plan computes the forced tokens as a chunk. So executors, retraction
and the radix tree know nothing of it. Owns nothing: tokens and pages belong to `RunningBatch`.
"""

from collections.abc import Sequence

import numpy as np

from bough.constrained.spelling import LONGEST
from bough.core.plan import mask_words
from bough.scheduler.constraint import Constraint
from bough.scheduler.ports import Grammars
from bough.scheduler.request import Request
from bough.scheduler.running_batch import RunningBatch

MOST = 8 * LONGEST  # bytes of forced text that are looked at; what is not spelt at once follows with later tokens
WORTHWHILE = 2  # forced tokens: the step in flight is lost, so a single one would come as early by itself


class JumpForward:
    def __init__(self, batch: RunningBatch, grammars: Grammars, eos_ids: Sequence[int], vocab_size: int) -> None:
        self._batch = batch
        self._table = batch.table
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
        tokens = self._grammars.spell(None, forced[:MOST]) if forced else ()
        # Something must be left to sample: that is when the client learns of them.
        if not 0 < len(tokens) < request.max_new or not request.stop_ids.isdisjoint(tokens):
            return
        if constraint.extend(tokens):
            request.begin_output(tokens)

    def after(self, request: Request, sampled: Sequence[int]) -> bool:
        """Lays what must follow the first of these tokens, the last known one and not the end, and says whether it did.
        Drafts gave the others. Where these are what must follow they stay, and are known."""
        generated, constraint = int(self._table.known[request.row]) - request.prompt_len, request.constraint
        if constraint is None or generated >= request.max_new:
            return False
        forced = constraint.forced()
        if len(forced) <= LONGEST and self._end(request, constraint, sampled[0], forced):
            return True
        return bool(forced) and self._jump(request, constraint, sampled, forced[:MOST])

    def _end(self, request: Request, constraint: Constraint, last: int, forced: bytes) -> bool:
        """Lays down the rest of a text behind which nothing else could come, and its end. That would have a logprob, so
        a request that wants some samples it."""
        if request.logprobs is not None:
            return False
        if not forced:
            ends, tokens = constraint.must_end(self._mask), [last]
        else:
            tokens = list(self._grammars.spell(last, forced, whole=True))
            fits = len(tokens) < self._room(request) and request.stop_ids.isdisjoint(tokens)
            ends = fits and constraint.finish(last, tokens, self._mask)
        if ends:
            self._lay(request, last, [*tokens, self._eos_ids[0]], ends=True)
        return ends

    def _jump(self, request: Request, constraint: Constraint, sampled: Sequence[int], forced: bytes) -> bool:
        last, room = sampled[0], self._room(request)
        tokens = self._grammars.spell(last, forced)[:room]
        until_stop = next((count for count, token in enumerate(tokens, 1) if token in request.stop_ids), room)
        tokens = tokens[:until_stop]
        if len(tokens) <= WORTHWHILE:
            return False
        ends = len(tokens) == room or tokens[-1] in request.stop_ids
        unscored = ends and request.logprobs is not None  # an ending is not computed any more
        if unscored or not constraint.replace(last, tokens):
            return False
        if not ends and list(tokens) == sampled[: len(tokens)]:
            self._table.lay(request.row, int(self._table.known[request.row]) - 1, tokens)
            return False
        self._lay(request, last, tokens, ends=ends)
        return True

    def _room(self, request: Request) -> int:
        """How many tokens may stand from the place of the last one on."""
        return request.max_new - (int(self._table.known[request.row]) - 1 - request.prompt_len)

    def _lay(self, request: Request, last: int, tokens: Sequence[int], *, ends: bool) -> None:
        """Writes tokens in the place of the last one. Unless they end the text, those that are new there are computed,
        and scored where that was asked."""
        table, row = self._table, request.row
        first = int(table.known[row]) - 1
        table.lay(row, first, tokens)
        kept = first + (tokens[0] == last)
        if ends:  # what a step in flight computes for a token that was replaced must not get into the tree
            table.cut(row, length=kept)
            return
        if request.logprobs is not None:
            kept -= 1  # the token before tells of the first forced one
            request.score_between(kept, int(table.known[row]) - 1)
        self._batch.rewind(request, min(kept, int(table.length[row])))
