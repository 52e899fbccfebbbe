"""Applies the result of a step: records tokens, finds who has ended, frees them, and sends the news on.

All arithmetic over rows is vectorised; Python touches a request one by one only when something happens to it (it
starts, it ends, it wants logprobs).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from bough.core.finish import FinishAbort, FinishLength, FinishReason, FinishStop
from bough.core.plan import BoolArray, IntArray, PositionLogprobs, StepResult
from bough.core.sampling_params import SamplingParams
from bough.messages.outputs import Ended, LogprobRun, Open, Started, StepOutput
from bough.scheduler.assembly import Chunk, PlannedStep
from bough.scheduler.grammar_steps import GrammarSteps
from bough.scheduler.ports import Outbox
from bough.scheduler.request import Request
from bough.scheduler.residents import Residents
from bough.scheduler.rows import RowIndex

BAD_LOGITS = FinishAbort(
    "The model produced numbers that are not finite for this request (NaN or infinity); other requests go on.",
    status_code=500,
    err_type="InternalServerError",
)
BAD_PROCESSOR = FinishAbort(
    "The request's custom_logit_processor failed, or made numbers that are not finite; the engine's log says more.",
    field="custom_logit_processor",
)


class Committer:
    """Turns step results into tokens, endings and messages."""

    def __init__(
        self,
        residents: Residents,
        grammars: GrammarSteps,
        outbox: Outbox,
        eos_ids: Sequence[int],
        forget: Callable[[Request], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._residents = residents
        self._table = residents.table
        self._grammars = grammars
        self._outbox = outbox
        self._eos_ids = np.array(sorted(eos_ids), dtype=np.int32)
        self._clock = clock
        self._forget = forget  # called for each request that has ended
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    def commit(self, step: PlannedStep, result: StepResult) -> None:
        table, plan = self._table, step.plan
        planned = plan.rows.astype(np.intp)
        live = table.serial[planned] == step.serials  # rows that ended or were aborted meanwhile have moved on
        kept = live[plan.sample]
        rows = planned[plan.sample][kept]
        tokens, bad = result.tokens[kept, 0], result.bad[kept]
        before = table.known[rows]
        table.tokens[rows, before] = tokens
        table.known[rows] = before + 1
        failed = self._grammars.advance(rows, tokens, bad)
        self.generated_tokens += int((table.known[rows] - before).sum())

        chunks = [(step.decodes + i, c) for i, c in enumerate(step.chunks) if live[step.decodes + i]]
        started = self._starts(chunks, result)
        logprobs = {int(table.handle[plan.rows[i]]): run for i, run in result.output_logprobs.items() if live[i]}
        single, runs = self._told_together(rows, before, logprobs)
        # A retracted request computes its tokens again before it gets the next one: that is when its count goes out.
        retractions = {c.request.handle: c.request.retractions for _, c in chunks if c.final and c.request.retractions}
        message = StepOutput(
            table.handle[rows[single]].tobytes(),
            tokens[single].tobytes(),
            started,
            [],
            {handle: pack_logprobs(run) for handle, run in logprobs.items()},
            retractions,
            runs,
        )
        ended = self._ended_rows(rows, tokens, bad, failed)
        ended += [(c.request, FinishLength(0)) for _, c in chunks if c.final and c.request.max_new == 0]
        for request, reason in ended:
            message.ended.append(Ended(request.handle, reason, request.retractions))
            self._residents.leave(request)
            self._forget(request)
        if len(rows) or started or ended:
            self._outbox.tokens(message)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Ends a request outside of a step; its row, if it has one, is freed at once."""
        self.drop(request)
        self._outbox.tokens(StepOutput(b"", b"", [], [Ended(request.handle, reason, request.retractions)]))

    def drop(self, request: Request) -> None:
        """Frees a request whose caller has had its last word already."""
        if request.row >= 0:
            self._residents.leave(request)
        self._forget(request)

    def refuse(self, handle: int, reason: FinishAbort) -> None:
        """Answers a request that never became one; no token comes, so how it would have been spelt does not matter."""
        self._outbox.tokens(Open(handle, SamplingParams(), b"", False))
        self._outbox.tokens(StepOutput(b"", b"", [], [Ended(handle, reason, 0)]))

    def _told_together(
        self, rows: RowIndex, before: IntArray, logprobs: dict[int, PositionLogprobs]
    ) -> tuple[BoolArray, dict[int, bytes]]:
        """Which rows tell the one token they sampled, and what the others tell, by handle. Those that a grammar pushed
        on have more to tell, or less: forced tokens wait for their logprobs, which are brought into line here."""
        table = self._table
        constrained = table.constrained[rows]
        single, runs = ~constrained, dict[int, bytes]()
        for place in constrained.nonzero()[0].tolist():
            row, first = int(rows[place]), int(before[place])
            request, known = table.request_in(row), int(table.known[row])
            awaiting = known - 1 - request.logprob_next if request.logprob_next < request.logprob_end else 0
            told = slice(first - request.untold, known - awaiting)
            request.untold = awaiting
            if told == slice(first, known) and known == first + 1:
                single[place] = True
                continue
            if told.stop > told.start:
                runs[request.handle] = table.tokens[row, told].tobytes()
            if request.logprobs is not None:
                sampled = logprobs.pop(request.handle)
                pieces = [*request.forced_logprobs, *([sampled] if told.stop > first else [])]
                request.forced_logprobs.clear()
                if pieces:
                    logprobs[request.handle] = _joined(pieces)
        return single, runs

    def _ended_rows(
        self, rows: RowIndex, tokens: IntArray, bad: BoolArray, failed: dict[int, FinishAbort]
    ) -> list[tuple[Request, FinishReason]]:
        """Requests that end with the token they just got, and why."""
        table = self._table
        stopped = (tokens[:, None] == self._eos_ids).any(axis=1) & table.heeds_eos[rows]  # of which there are few
        for i in table.has_stop_ids[rows].nonzero()[0].tolist():
            stopped[i] |= int(tokens[i]) in table.request_in(int(rows[i])).stop_ids
        generated = table.known[rows] - table.prompt_len[rows]
        full = generated >= table.max_new[rows]
        ended: list[tuple[Request, FinishReason]] = []
        for i in sorted({*(stopped | full | bad).nonzero()[0].tolist(), *failed}):
            reason: FinishReason
            if bad[i] or i in failed:
                own_code = table.request_in(int(rows[i])).processor is not None
                reason = failed.get(i, BAD_PROCESSOR if own_code else BAD_LOGITS)
            elif stopped[i]:
                reason = FinishStop(int(tokens[i]))
            else:
                reason = FinishLength(int(generated[i]))
            ended.append((table.request_in(int(rows[i])), reason))
        return ended

    def _starts(self, chunks: Sequence[tuple[int, Chunk]], result: StepResult) -> list[Started]:
        """Prompts that are now complete, with what they cost; also gathers the prompt logprobs of every chunk, which
        comes with its place in the batch."""
        started: list[Started] = []
        for index, chunk in chunks:
            request = chunk.request
            if index in result.input_logprobs:
                scored = request.forced_logprobs if request.started else request.input_logprobs
                scored.append(result.input_logprobs[index])
            if chunk.final and not request.started:
                request.started = True
                self.generated_tokens += request.untold  # what its grammar had the answer begin with
                self.prompt_tokens += request.prompt_len
                self.cached_tokens += request.cached_tokens
                started.append(
                    Started(
                        request.handle,
                        request.prompt_len,
                        request.cached_tokens,
                        request.queue_time_s,
                        pack_logprobs(_joined(request.input_logprobs)) if request.input_logprobs else None,
                        request.ran_s + self._clock() - request.since,
                        () if request.constraint is None else request.constraint.warnings,
                    )
                )
        return started


def pack_logprobs(run: PositionLogprobs) -> LogprobRun:
    return LogprobRun(
        run.tokens.tobytes(),
        run.logprobs.tobytes(),
        run.top_ids.shape[1],
        run.top_logprobs.tobytes(),
        run.top_ids.tobytes(),
        run.id_logprobs.tobytes(),
    )


def _joined(runs: Sequence[PositionLogprobs]) -> PositionLogprobs:
    """Logprobs of consecutive positions as one run."""
    return PositionLogprobs(
        np.concatenate([r.tokens for r in runs]),
        np.concatenate([r.logprobs for r in runs]),
        np.concatenate([r.top_logprobs for r in runs]),
        np.concatenate([r.top_ids for r in runs]),
        np.concatenate([r.id_logprobs for r in runs]),
    )
