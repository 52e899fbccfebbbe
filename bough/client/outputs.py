"""What has come back for one request so far, and its form for the caller.

A reader takes what is there when it gets its turn, as a `Piece`: what waits for a slow reader is one entry per request,
not a growing queue. Adding a delta and taking a piece cost as much as what is new.
"""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from bough.client.inputs import Prompt
from bough.core.finish import FinishAbort, FinishReason, finish_to_dict
from bough.core.pooling import ALL_EXPERTS, ALL_STATES, OF_TOKENS
from bough.messages.outputs import Delta, DraftCounts, LogprobRun, Started
from bough.observability.request_meter import RequestMeter
from bough.tokenizer.tokenizer import Tokenizer

Entry = tuple[float | None, int, str | None]  # logprob (None where there is none), token id, its text if asked for


@dataclass(slots=True)
class LogprobColumns:
    """By position: logprobs of the token itself, of the likeliest, and of the ids that were asked for."""

    tokens: list[Entry] = field(default_factory=list)
    top: list[list[Entry] | None] = field(default_factory=list)
    chosen: list[list[Entry] | None] = field(default_factory=list)

    def add_first(self, token: int, text_of: Callable[[int], str | None]) -> None:
        self.tokens.append((None, token, text_of(token)))
        self.top.append(None)
        self.chosen.append(None)

    def followed_by(self, other: LogprobColumns, start: int, end: int) -> LogprobColumns:
        """With a part of others behind these."""
        top, chosen = self.top + other.top[start:end], self.chosen + other.chosen[start:end]
        return LogprobColumns(self.tokens + other.tokens[start:end], top, chosen)

    def add(self, run: LogprobRun, ids: Sequence[int], text_of: Callable[[int], str | None]) -> None:
        """Unpacks a run; `ids` are those that the request named."""

        def entries(values: Sequence[float], tokens: Sequence[int]) -> list[Entry]:
            pairs = zip(values, tokens, strict=True)
            return [(value if math.isfinite(value) else None, token, text_of(token)) for value, token in pairs]

        tokens = np.frombuffer(run.tokens, dtype=np.int32).tolist()
        n = len(tokens)
        top_values = np.frombuffer(run.top_logprobs, dtype=np.float32).reshape(n, run.top).tolist()
        top_ids = np.frombuffer(run.top_ids, dtype=np.int32).reshape(n, run.top).tolist()
        chosen = np.frombuffer(run.id_logprobs, dtype=np.float32).reshape(n, len(ids)).tolist()
        self.tokens += entries(np.frombuffer(run.logprobs, dtype=np.float32).tolist(), tokens)
        self.top += [entries(values, of) for values, of in zip(top_values, top_ids, strict=True)]
        self.chosen += [entries(values, ids) for values in chosen]


class Timings(msgspec.Struct, frozen=True):
    """Where the time went, in seconds; part of `meta_info` when `return_timings` was asked."""

    queue_s: float
    prefill_s: float
    prefill_cached_tokens: int
    prefill_new_tokens: int
    time_to_first_token_s: float
    decode_s: float
    tokens_per_second: float | None
    total_s: float

    @classmethod
    def of(cls, started: Started, total_s: float, output_tokens: int) -> Timings:
        """Queue and prefill are the engine's own figures, the total is the client's. The rate is that of the decode, so
        without the first token; None where there was nothing to measure."""
        queue_s, prefill_s = started.queue_time_s, started.prefill_time_s
        decode_s = max(0.0, total_s - queue_s - prefill_s)
        return cls(
            queue_s=round(queue_s, 6),
            prefill_s=round(prefill_s, 6),
            prefill_cached_tokens=started.cached_tokens,
            prefill_new_tokens=started.prompt_tokens - started.cached_tokens,
            time_to_first_token_s=round(queue_s + prefill_s, 6),
            decode_s=round(decode_s, 6),
            tokens_per_second=round((output_tokens - 1) / decode_s, 3) if output_tokens > 1 and decode_s > 0 else None,
            total_s=round(total_s, 6),
        )

    def to_header(self, *, finished: bool = True) -> str:
        """The value of a `Server-Timing` header, in milliseconds; of an unfinished answer only what cannot change."""
        parts = {"queue": self.queue_s, "prefill": self.prefill_s, "ttft": self.time_to_first_token_s}
        if finished:
            parts |= {"decode": self.decode_s, "total": self.total_s}
        entries = [f"{name};dur={seconds * 1000:.3f}" for name, seconds in parts.items()]
        entries.append(f'tokens;desc="cached={self.prefill_cached_tokens} new={self.prefill_new_tokens}"')
        if finished and self.tokens_per_second is not None:
            entries.append(f'tokens_per_second;desc="{self.tokens_per_second:.3f}"')
        return ", ".join(entries)


class LatencyRecorder:
    __slots__ = ("_ended", "_last_at", "_meter", "_received_at", "_tokens")

    def __init__(self, meter: RequestMeter, received_at: float) -> None:
        self._meter = meter
        self._received_at = self._last_at = received_at
        self._tokens = 0
        self._ended = False

    def add(self, delta: Delta, tokens: int, now: float) -> None:
        started, more = delta.started, tokens
        if started is not None:
            self._meter.started(started.prompt_tokens, started.cached_tokens, started.queue_time_s)
        if started is not None and tokens:  # of several tokens, only the engine knows when the first one came
            first_at = self._received_at + started.queue_time_s + started.prefill_time_s
            self._last_at = min(first_at, now) if tokens > 1 else now
            self._meter.first_token(self._last_at - self._received_at)
            more -= 1
        if more:
            self._meter.more_tokens(more, now - self._last_at)
            self._last_at = now
        self._tokens += tokens
        if delta.finish is not None:
            self._end(now, delta.retractions, incomplete=isinstance(delta.finish, FinishAbort))

    def abandon(self, retractions: int) -> None:
        if not self._ended:
            self._end(time.perf_counter(), retractions, incomplete=True)

    def _end(self, now: float, retractions: int, *, incomplete: bool) -> None:
        self._ended = True
        self._meter.ended(self._tokens, now - self._received_at, retractions, incomplete=incomplete)


class Piece(msgspec.Struct, frozen=True):
    """What one answer got since its reader last looked; the last piece has `finish`. One is made for every token, so it
    must be cheap."""

    answer: RequestOutput  # everything known so far; it may run ahead of this piece while its reader is busy
    text: str
    ids: list[int]
    first: int  # output tokens of this answer that came in earlier pieces
    finish: FinishReason | None  # as of this piece

    @property
    def logprob_span(self) -> tuple[int, int]:
        """Where its tokens begin and end in the answer's columns of logprobs."""
        first = self.first - self.answer.resumed_ids
        return first, first + len(self.ids)

    @property
    def index(self) -> int:
        return self.answer.index


ID_BYTES = 4  # of a token id on the wire


class UpdateQueue:
    """The answers of one call that have unread output. There is one reader."""

    __slots__ = ("_fresh", "_waiter")

    def __init__(self) -> None:
        self._fresh: dict[int, RequestOutput] = {}  # by handle, in the order of their updates
        # A plain future: an event costs three times as much, and one is awaited for every token of every stream.
        self._waiter: asyncio.Future[None] | None = None

    def put(self, answer: RequestOutput) -> None:
        self._fresh[answer.handle] = answer
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: the reader was cancelled
            waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """Waits for an answer with new output; raises if the engine died before that answer was complete."""
        while not self._fresh:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        answer = self._fresh.pop(next(iter(self._fresh)))
        if answer.error is not None:
            raise answer.error
        return answer


class RequestOutput:
    """One request's output, cumulative. Lives on the client's event loop."""

    def __init__(
        self,
        handle: int,
        index: int,
        prompt: Prompt,
        tokenizer: Tokenizer | None,
        updates: UpdateQueue,
        meter: RequestMeter | None = None,
    ) -> None:
        self.handle = handle
        self.index = index  # among the prompts of its call
        self.prompt = prompt
        self.ids: list[int] = []
        self.stream = False  # its reader wants what there is, not only the whole
        self.dp_rank: int | None = None  # of the replica that has it, where there are several
        self.moved = False  # from a replica that died
        self.prefill_tokens = 0.0  # that its replica is expected to compute before its first token
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self.input_logprobs = LogprobColumns()
        self.output_logprobs = LogprobColumns()  # may be longer than `ids`: tokens after a stop string are cut
        self.vector = np.zeros(0, dtype=np.float32)  # of a request for one
        self.states: list[Any] = []  # hidden states or experts of prompt and output, where they are wanted
        self.resumed_ids = 0  # of `ids`, those delivered before the stream was resumed; they have no logprobs
        self.resumed_text = ""  # their text: parsers of the stream read it before they read what follows
        self._read: list[str] = []  # text that was taken in pieces; `_unread` follows it
        self._unread: list[str] = []
        self._read_ids = 0
        self._tokenizer = tokenizer
        self.started = False  # its prompt was computed
        self._started = Started(handle, len(prompt.ids), 0, queue_time_s=0.0)
        self._retractions, self._weight_version = 0, ""
        self._drafts: DraftCounts | None = None
        self._updates = updates
        self.received_at = time.perf_counter()
        self.finished_at: float | None = None
        self._latency = None if meter is None else LatencyRecorder(meter, self.received_at)

    def add(self, delta: Delta, now: float | None = None) -> None:
        """`now` is when the delta arrived, where that is known."""
        now = now or time.perf_counter()
        if delta.text:
            self._unread.append(delta.text)
        self.ids += memoryview(delta.ids).cast("i")
        for run in delta.logprobs:
            self._add_logprobs(self.output_logprobs, run)
        for states in delta.states:
            self.states[states.first :] = np.frombuffer(states.values, dtype=np.float32).reshape(states.count, -1)
        if delta.started is not None:
            self._start(delta.started)
        self._retractions, self._drafts = delta.retractions, delta.drafts or self._drafts
        self._weight_version = delta.weight_version
        if delta.finish is not None:
            self.finish, self.vector = delta.finish, np.frombuffer(delta.vector, dtype=np.float32)
            self.finished_at = now
        if self._latency is not None:
            self._latency.add(delta, len(delta.ids) // ID_BYTES, now)
        self._updates.put(self)

    def replay(self, replay: Delta) -> None:
        """Adds what was delivered before the stream was resumed: part of the answer, but no update."""
        self.resumed_text = replay.text
        self._read.append(replay.text)
        self.ids += memoryview(replay.ids).cast("i")
        self.resumed_ids = self._read_ids = len(self.ids)

    def fail(self, error: Exception) -> None:
        if self.finish is None:
            self.error = error
            self._updates.put(self)

    def abandon(self) -> None:
        if self._latency is not None:
            self._latency.abandon(self._retractions)

    def take(self) -> Piece:
        """The output since the last piece. An answer has one reader."""
        text, first = "".join(self._unread), self._read_ids
        if text:
            self._read.append(text)
            self._unread.clear()
        self._read_ids = len(self.ids)
        return Piece(self, text, self.ids[first:], first, self.finish)

    @property
    def text(self) -> str:
        if len(self._read) > 1:  # kept joined: protocols that show everything ask again with every piece
            self._read = ["".join(self._read)]
        return "".join(self._read + self._unread)

    @property
    def resumed(self) -> bool:
        return self.prompt.resumption is not None

    @property
    def new_tokens(self) -> int:
        return len(self.ids) - self.resumed_ids

    @property
    def logprob_entries(self) -> int:
        wanted = self.prompt.logprobs
        known = len(self.input_logprobs.tokens) + len(self.output_logprobs.tokens)
        return 0 if wanted is None else known * wanted.width

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def refusal(self) -> FinishAbort | None:
        """Why the engine refused the request, if it did; a caller's own abort is no refusal."""
        refused = isinstance(self.finish, FinishAbort) and self.finish.status_code != 499
        return self.finish if refused else None  # type: ignore[return-value]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt that were used: one that is too long may have been truncated."""
        return self._started.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self._started.cached_tokens

    @property
    def warnings(self) -> tuple[str, ...]:
        return self.prompt.warnings + self._started.warnings

    @property
    def timings(self) -> Timings:
        return Timings.of(self._started, (self.finished_at or time.perf_counter()) - self.received_at, self.new_tokens)

    def to_dict(self) -> dict[str, Any]:
        if self.prompt.pooling not in (None, *OF_TOKENS):
            return {"embedding": self.vector.tolist(), "meta_info": self.meta_info()}
        shown = {"text": self.text} if self._tokenizer is not None else {}
        return {**shown, "output_ids": list(self.ids), "meta_info": self.meta_info()}

    def meta_info(self) -> dict[str, Any]:
        end = self.finished_at or time.perf_counter()
        meta: dict[str, Any] = {
            "id": self.prompt.rid,
            "finish_reason": None if self.finish is None else finish_to_dict(self.finish),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.ids),
            "cached_tokens": self.cached_tokens,
            "reasoning_tokens": 0,
            "num_retractions": self._retractions,
            "weight_version": self._weight_version or self._started.weight_version,
            "queue_time": self._started.queue_time_s,
            "e2e_latency": end - self.received_at,
        }
        if self._started.host_tokens is not None:
            meta["cached_tokens_details"] = self.cached_details
        if self.dp_rank is not None:
            meta["dp_rank"] = self.dp_rank
        if self.warnings:
            meta["warnings"] = list(self.warnings)
        if self.prompt.show_ids:
            meta["prompt_token_ids"] = self.prompt.shown_ids[: self.prompt_tokens].tolist()
        if self._drafts is not None:
            meta.update(draft_fields(self._drafts, len(self.ids)))
        if self.prompt.pooling == ALL_STATES and self.finish is not None:  # much: a stream has them at its end
            meta["hidden_states"] = self.hidden_states
        if self.prompt.pooling == ALL_EXPERTS and self.finish is not None:
            meta["routed_experts"] = self.routed_experts
        wanted, given, output, count = self.prompt.logprobs, self.input_logprobs, self.output_logprobs, self.new_tokens
        if wanted is not None:
            # The tokens after a stop string's match were cut; so are their logprobs.
            meta["input_token_logprobs"] = list(given.tokens)
            meta["output_token_logprobs"] = output.tokens[:count]
            meta["output_token_logprobs_length"] = count
        if wanted is not None and wanted.top:
            meta["input_top_logprobs"] = list(given.top)
            meta["output_top_logprobs"] = output.top[:count]
        if wanted is not None and wanted.ids:
            meta["input_token_ids_logprobs"] = list(given.chosen)
            meta["output_token_ids_logprobs"] = output.chosen[:count]
        return meta

    @property
    def cached_details(self) -> dict[str, Any]:
        """Cached tokens by where they were found."""
        host, (stored, backend) = self._started.host_tokens or 0, self._started.storage or (0, None)
        stored = min(stored, host)
        details = {"device": self.cached_tokens - host, "host": host - stored, "storage": stored}
        lower = {"disk": stored, "store": 0} if backend == "file" else {"disk": 0, "store": stored}
        return {**details, "storage_backend": backend if stored else None, **lower}

    @property
    def hidden_states(self) -> list[Any]:
        """Those of the prompt as one entry, then one for each token of the output but the last, which no step read."""
        rows = [row.tolist() for row in self._states()]
        return [rows[: self.prompt_tokens], *rows[self.prompt_tokens :]]

    @property
    def routed_experts(self) -> str:
        """Base64 of int32 [tokens but the last, layers, experts of a token], as SGLang has them."""
        rows = self._states()[self.prompt.experts_start :]
        return base64.b64encode(b"".join(row.tobytes() for row in rows)).decode()

    def _states(self) -> list[Any]:
        """Without those of tokens that a stop string cuts off."""
        return self.states[: self.prompt_tokens + max(len(self.ids) - 1, 0)]

    def _start(self, started: Started) -> None:
        self.started, self._started = True, started
        wanted = self.prompt.logprobs
        if wanted is None or wanted.start < 0:
            return
        self.input_logprobs.add_first(int(self.prompt.shown_ids[wanted.start]), self._text_of)
        if started.input_logprobs is not None:
            self._add_logprobs(self.input_logprobs, started.input_logprobs)

    def _add_logprobs(self, columns: LogprobColumns, run: LogprobRun) -> None:
        ids = () if self.prompt.logprobs is None else self.prompt.logprobs.ids
        columns.add(run, ids, self._text_of)

    def _text_of(self, token: int) -> str | None:
        if not self.prompt.logprob_texts or self._tokenizer is None:
            return None
        return self._tokenizer.token_text(token)


def draft_fields(drafts: DraftCounts, tokens: int) -> dict[str, Any]:
    """How speculation fared, in SGLang's names."""
    steps, correct = sum(drafts.held), sum(count * steps for count, steps in enumerate(drafts.held))
    return {
        "spec_verify_ct": steps,
        "spec_accept_length": tokens / steps,
        "spec_accept_rate": correct / drafts.proposed if drafts.proposed else 0.0,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": drafts.proposed,
        "spec_accept_histogram": list(drafts.held),
    }
