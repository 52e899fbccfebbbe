"""Applies the result of a step: records tokens, finds who has ended, frees them, and sends the news on.

All arithmetic over rows is vectorised; Python touches a request one by one only when something happens to it (it
starts, it ends, it wants logprobs).
"""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from bough.core.finish import FinishAbort, FinishLength, FinishReason, FinishStop
from bough.core.plan import BoolArray, FloatArray, IntArray, PositionLogprobs, StepResult, positions_in_runs
from bough.core.pooling import OF_TOKENS
from bough.core.sampling_params import SamplingParams
from bough.messages.outputs import (
    WEIGHT_VERSION,
    DraftCounts,
    Ended,
    HiddenStates,
    LogprobRun,
    Open,
    Started,
    StepOutput,
)
from bough.scheduler.assembly import Chunk, PlannedStep
from bough.scheduler.grammar_steps import GrammarSteps
from bough.scheduler.ports import Outbox
from bough.scheduler.request import Request
from bough.scheduler.rows import RowIndex
from bough.scheduler.running_batch import RunningBatch

NO_TOKEN = -1  # of a row that got none
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
    def __init__(
        self,
        batch: RunningBatch,
        grammars: GrammarSteps,
        outbox: Outbox,
        eos_ids: Sequence[int],
        forget: Callable[[Request], None],
        clock: Callable[[], float] = time.monotonic,
        facts: Mapping[str, str] | None = None,
        *,
        speculates: bool = False,
    ) -> None:
        self._batch = batch
        self._table = batch.table
        self._grammars = grammars
        self._outbox = outbox
        self._eos_ids = np.array(sorted(eos_ids), dtype=np.int32)
        self._clock = clock
        self._forget = forget  # called for each request that has ended
        self._facts: Mapping[str, str] = {} if facts is None else facts  # of the engine, at any moment
        self._version = self._weight_version  # that of the last step
        self._speculates = speculates
        self.generated_tokens = 0
        self.prefilled_tokens = 0  # computed in chunks: of prompts, after a retraction too, and what grammars forced
        self.decoded_tokens = 0  # generated, but for those that a chunk ended with
        self.prompt_tokens = 0
        self.cached_tokens = 0

    @property
    def figures(self) -> dict[str, object]:
        prefilled, cached, decoded = self.prefilled_tokens, self._batch.matched_tokens, self.decoded_tokens
        return {
            "realtime_tokens": {"prefill_compute": prefilled, "prefill_cache": cached, "decode": decoded},
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
        }

    def commit(self, step: PlannedStep, result: StepResult) -> None:
        table, plan = self._table, step.plan
        planned = plan.rows.astype(np.intp)
        live = table.serial[planned] == step.serials  # rows that ended or were aborted meanwhile have moved on
        kept = live[plan.sample]
        rows = planned[plan.sample][kept]
        tokens, counts, bad = result.tokens[kept], result.counts[kept], result.bad[kept]
        before = table.known[rows]
        begun = table.known[planned] - 1  # where those that decode go on
        last, failed = tokens[:, 0], dict[int, FinishAbort]()
        several = tokens.shape[1] > 1 or not counts.all() or bool(table.constrained[rows].any())
        if several or step.has_drafts:
            table.give_back(rows, table.gains(plan.sample_widths[kept]) - counts)
            table.append(rows, tokens, self._until_stop(rows, tokens, counts))
            failed = self._grammars.advance(rows, before, bad)  # which may force tokens, or take some back
            known = table.known[rows]
            last = np.where(known > before, table.tokens[rows, known - 1], NO_TOKEN)
            self.generated_tokens += int((known - before).sum())
        else:
            table.append_one(rows, last)
            self.generated_tokens += len(rows)

        chunks = [(step.decodes + i, c) for i, c in enumerate(step.chunks) if live[step.decodes + i]]
        self.prefilled_tokens += sum(chunk.count for chunk in step.chunks)
        decodes = int((live & plan.sample)[: step.decodes].sum())  # rows that decode stand before those with chunks
        self.decoded_tokens += int((table.known[rows[:decodes]] - before[:decodes]).sum())
        started = self._starts(chunks, result)
        logprobs = {int(table.handle[plan.rows[i]]): run for i, run in result.output_logprobs.items() if live[i]}
        packed = table.handle[rows].tobytes(), last.tobytes(), b""
        if several:
            packed = self._packed(rows, *self._sent(rows, before, logprobs))
        # A retracted request computes its tokens again before it gets the next one: that is when its count goes out.
        version, again = self._weight_version, [c.request for _, c in chunks if c.final and c.request.retractions]
        if version != self._version:  # those that were paused in place go on with other weights
            self._version, again = version, table.running_requests()
        message = StepOutput(
            *packed,
            started,
            [],
            {handle: pack_logprobs(run) for handle, run in logprobs.items()},
            {request.handle: (request.retractions, version) for request in again},
            self._draft_counts(rows),
        )
        ended = self._ended_rows(rows, last, bad, failed)
        without_tokens = [(i, c.request) for i, c in chunks if c.final and c.request.max_new == 0]
        ended += [(request, _ending(request, result.vectors.get(i))) for i, request in without_tokens]
        vectors: dict[int, bytes] = {}
        for i, vector in ((i, vector) for i, vector in result.vectors.items() if live[i]):
            request, first = table.request_in(int(planned[i])), int(begun[i])
            if request.pooling not in OF_TOKENS:
                vectors[request.handle] = vector.tobytes()
                continue
            if i >= step.decodes:
                first = step.chunks[i - step.decodes].first
            else:
                vector = vector[: int(table.known[planned[i]]) - 1 - first]  # drafts that do not hold are no part
            if len(vector):
                message.states[request.handle] = HiddenStates(first, len(vector), vector.tobytes())
        for request, reason in ended:
            request.answer(self._clock())
            of_request = request.handle, reason, request.retractions, request.drafts
            message.ended.append(Ended(*of_request, vectors.get(request.handle, b"")))
        if len(rows) or started or ended or message.states:
            self._outbox.tokens(message)
        for request, reason in ended:  # whose callers need not wait for this
            self.drop(request, spoilt=reason is BAD_LOGITS)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Ends a request outside of a step; its row, if it has one, is freed at once."""
        self.drop(request)
        self._tell(Ended(request.handle, reason, request.retractions, request.drafts), begun=request.started)

    def drop(self, request: Request, *, spoilt: bool = False) -> None:
        """Frees a request whose caller has had its last word already. `spoilt`: nobody may read its pages."""
        if request.row >= 0:
            self._batch.leave(request, spoilt=spoilt)
        self._forget(request)

    def refuse(self, handle: int, reason: FinishAbort) -> None:
        """Answers a request that never became one; no token comes, so how it would have been spelt does not matter."""
        self._outbox.tokens(Open(handle, SamplingParams(), b"", False))
        self._tell(Ended(handle, reason, 0), begun=False)

    def _tell(self, ended: Ended, *, begun: bool) -> None:
        """What no step has begun ends with the weights of now, not with those of the start."""
        version = {} if begun else {ended.handle: (ended.retractions, self._weight_version)}
        self._outbox.tokens(StepOutput(ended=[ended], retractions=version))

    def _until_stop(self, rows: RowIndex, tokens: IntArray, counts: IntArray) -> IntArray:
        """How many of each row's tokens stand: none behind one that ends the request."""
        table = self._table
        stops = (tokens[:, :, None] == self._eos_ids).any(axis=2) & table.heeds_eos[rows][:, None]
        for i in table.has_stop_ids[rows].nonzero()[0].tolist():
            stops[i] |= np.isin(tokens[i], list(table.request_in(int(rows[i])).stop_ids))
        first = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, tokens.shape[1])
        kept: IntArray = np.minimum(counts, first, dtype=np.int32, casting="unsafe")
        return kept

    def _sent(
        self, rows: RowIndex, before: IntArray, logprobs: dict[int, PositionLogprobs]
    ) -> tuple[IntArray, IntArray]:
        """From where to where each row's tokens go out now, and with them their logprobs, which are cut to that. Forced
        tokens wait for their logprobs."""
        table = self._table
        known = table.known[rows]
        sent_from, sent_to = before.copy(), known.copy()
        for place in table.constrained[rows].nonzero()[0].tolist():
            request = table.request_in(int(rows[place]))
            unsent, awaiting = request.hold_back(int(known[place]))
            sent_from[place] -= unsent
            sent_to[place] -= awaiting
        for place in table.wants_logprobs[rows].nonzero()[0].tolist():
            request = table.request_in(int(rows[place]))
            count = int(sent_to[place] - before[place])
            scored, sampled = request.take_forced_logprobs(), logprobs.pop(request.handle, None)
            if sampled is not None and count > 0:
                scored.append(sampled.first(count))
            if scored:
                logprobs[request.handle] = PositionLogprobs.joined(scored)
        return sent_from, sent_to

    def _packed(self, rows: RowIndex, first: IntArray, end: IntArray) -> tuple[bytes, bytes, bytes]:
        table, counts = self._table, np.maximum(end - first, 0)
        if (counts == 1).all():
            return table.handle[rows].tobytes(), table.tokens[rows, first].tobytes(), b""
        tokens = table.tokens[rows.repeat(counts), first.repeat(counts) + positions_in_runs(counts)]
        some = counts > 0
        return table.handle[rows[some]].tobytes(), tokens.tobytes(), counts[some].tobytes()

    def _ended_rows(
        self, rows: RowIndex, tokens: IntArray, bad: BoolArray, failed: dict[int, FinishAbort]
    ) -> list[tuple[Request, FinishReason]]:
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

    def _draft_counts(self, rows: RowIndex) -> dict[int, DraftCounts]:
        """Of requests that the detokenizer may end."""
        if not self._speculates:
            return {}
        requests = [self._table.request_in(row) for row in rows.tolist()]
        counted = [(r.handle, r.drafts) for r in requests if r.sampling.stop or r.sampling.stop_regex]
        return {handle: drafts for handle, drafts in counted if drafts is not None}

    @property
    def _weight_version(self) -> str:
        return self._facts.get("weight_version", WEIGHT_VERSION)

    def _starts(self, chunks: Sequence[tuple[int, Chunk]], result: StepResult) -> list[Started]:
        """Prompts that are now complete, with what they cost; also gathers the prompt logprobs of every chunk, which
        comes with its place in the batch."""
        started: list[Started] = []
        for index, chunk in chunks:
            request = chunk.request
            request.enter("decode" if chunk.final else "prefill", self._clock(), chunk.count)
            if index in result.input_logprobs:
                request.add_scores(result.input_logprobs[index])
            if chunk.final and not request.started:
                request.start()
                self.generated_tokens += request.unsent  # what its grammar had the answer begin with
                self.prompt_tokens += request.prompt_len
                self.cached_tokens += request.cached_tokens
                constraint = request.constraint
                started.append(
                    Started(
                        request.handle,
                        request.prompt_len,
                        request.cached_tokens,
                        request.queue_time_s,
                        pack_logprobs(PositionLogprobs.joined(request.input_logprobs))
                        if request.input_logprobs
                        else None,
                        request.ran_s + self._clock() - request.since,
                        request.warnings + (() if constraint is None else constraint.warnings),
                        self._weight_version,
                        request.fetched_tokens if self._batch.cache.tiered else None,
                        request.storage,
                    )
                )
        return started


def _ending(request: Request, vector: FloatArray | None) -> FinishReason:
    """Of a request that its prompt ends: nothing is sampled, so what else it gets tells whether all went well."""
    scores = (run.logprobs for run in request.input_logprobs)
    if any(np.isnan(run).any() for run in scores) or not (vector is None or np.isfinite(vector).all()):
        return BAD_LOGITS
    return FinishLength(0) if request.pooling in (None, *OF_TOKENS) else FinishStop(None)


def pack_logprobs(run: PositionLogprobs) -> LogprobRun:
    top = run.top_ids.shape[1], run.top_logprobs.tobytes(), run.top_ids.tobytes()
    return LogprobRun(run.tokens.tobytes(), run.logprobs.tobytes(), *top, run.id_logprobs.tobytes())
