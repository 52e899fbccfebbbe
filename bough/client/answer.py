"""What has come back for one request so far, and its form for the caller.

Deltas are gathered as they arrive; a reader takes whatever is there when it gets its turn. A slow reader therefore
finds several tokens in one piece instead of a growing queue: what waits for it is at most one entry per request.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bough.client.inputs import Prompt
from bough.core.finish import FinishAbort, FinishReason, finish_to_dict
from bough.messages.outputs import Delta, LogprobRun, Started
from bough.messages.requests import LogprobRequest
from bough.tokenizer.tokenizer import Tokenizer

Entry = tuple[float | None, int, str | None]
WEIGHT_VERSION = "default"  # weights are loaded once; SGLang's clients expect the field


class News:
    """Which answers of one call have something that their reader has not seen."""

    def __init__(self) -> None:
        self._fresh: dict[int, Answer] = {}  # by handle, in the order in which their news came
        self._arrived = asyncio.Event()

    def tell(self, answer: Answer) -> None:
        self._fresh[answer.handle] = answer
        self._arrived.set()

    async def next(self) -> Answer:
        """Waits for an answer with something new; raises if the engine has died before that answer was complete."""
        while not self._fresh:
            self._arrived.clear()
            await self._arrived.wait()
        answer = self._fresh.pop(next(iter(self._fresh)))
        if answer.error is not None:
            raise answer.error
        return answer


class Answer:
    """One request's output, cumulative. Lives on the client's event loop."""

    def __init__(self, handle: int, index: int, prompt: Prompt, tokenizer: Tokenizer | None, news: News) -> None:
        self.handle = handle
        self.index = index  # among the prompts of its call
        self.prompt = prompt
        self.text = ""
        self.ids: list[int] = []
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self._tokenizer = tokenizer
        self._started: Started | None = None
        self._retractions = 0
        self._output_logprobs = _Columns()
        self._input_logprobs = _Columns()
        self._news = news
        self._received_at = time.perf_counter()
        self._finished_at: float | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.ids += np.frombuffer(delta.ids, dtype=np.int32).tolist()
        for run in delta.logprobs:
            self._add_logprobs(self._output_logprobs, run)
        if delta.started is not None:
            self._start(delta.started)
        self._retractions = delta.retractions
        if delta.finish is not None:
            self.finish = delta.finish
            self._finished_at = time.perf_counter()
        self._news.tell(self)

    def fail(self, error: Exception) -> None:
        """The engine is gone: whoever waits gets the error."""
        if self.finish is None:
            self.error = error
            self._news.tell(self)

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def refusal(self) -> FinishAbort | None:
        """Why the engine could not serve the request, if it could not; a caller's own abort is no refusal."""
        refused = isinstance(self.finish, FinishAbort) and self.finish.status_code != 499
        return self.finish if refused else None  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """SGLang's form of an output, complete up to now."""
        shown = {"text": self.text} if self._tokenizer is not None else {}
        return {**shown, "output_ids": list(self.ids), "meta_info": self._meta_info()}

    def _start(self, started: Started) -> None:
        self._started = started
        wanted = self.prompt.logprobs
        if wanted is None or wanted.start < 0:
            return
        first = int(self.prompt.ids[wanted.start])
        self._input_logprobs.add([(None, first, self._text_of(first))], [None], [None])  # nothing stands before it
        if started.input_logprobs is not None:
            self._add_logprobs(self._input_logprobs, started.input_logprobs)

    def _meta_info(self) -> dict[str, Any]:
        started = self._started
        prompt_tokens = len(self.prompt.ids) if started is None else started.prompt_tokens
        end = self._finished_at or time.perf_counter()
        meta: dict[str, Any] = {
            "id": self.prompt.rid,
            "finish_reason": None if self.finish is None else finish_to_dict(self.finish),
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(self.ids),
            "cached_tokens": 0 if started is None else started.cached_tokens,
            "reasoning_tokens": 0,
            "num_retractions": self._retractions,
            "weight_version": WEIGHT_VERSION,
            "queue_time": 0.0 if started is None else started.queue_time_s,
            "e2e_latency": end - self._received_at,
        }
        if self.prompt.show_ids:
            meta["prompt_token_ids"] = self.prompt.ids[:prompt_tokens].tolist()
        if self.prompt.logprobs is not None:
            meta.update(self._logprob_fields(self.prompt.logprobs))
        return meta

    def _logprob_fields(self, wanted: LogprobRequest) -> dict[str, Any]:
        given, output, count = self._input_logprobs, self._output_logprobs, len(self.ids)
        # The tokens after a stop string's match were cut; so are their logprobs.
        fields: dict[str, Any] = {
            "input_token_logprobs": list(given.tokens),
            "output_token_logprobs": output.tokens[:count],
            "output_token_logprobs_length": count,
        }
        if wanted.top:
            fields["input_top_logprobs"] = list(given.top)
            fields["output_top_logprobs"] = output.top[:count]
        if wanted.ids:
            fields["input_token_ids_logprobs"] = list(given.chosen)
            fields["output_token_ids_logprobs"] = output.chosen[:count]
        return fields

    def _add_logprobs(self, columns: _Columns, run: LogprobRun) -> None:
        """Unpacks a run once, when it comes; every piece of a stream shows all entries again."""
        ids = () if self.prompt.logprobs is None else self.prompt.logprobs.ids
        tokens = np.frombuffer(run.tokens, dtype=np.int32).tolist()
        logprobs = np.frombuffer(run.logprobs, dtype=np.float32).tolist()
        n = len(tokens)
        top_values = np.frombuffer(run.top_logprobs, dtype=np.float32).reshape(n, run.top).tolist()
        top_ids = np.frombuffer(run.top_ids, dtype=np.int32).reshape(n, run.top).tolist()
        chosen = np.frombuffer(run.id_logprobs, dtype=np.float32).reshape(n, len(ids)).tolist()
        columns.add(
            self._entries(logprobs, tokens),
            [self._entries(values, of) for values, of in zip(top_values, top_ids, strict=True)],
            [self._entries(values, ids) for values in chosen],
        )

    def _entries(self, values: Sequence[float], tokens: Sequence[int]) -> list[Entry]:
        return [
            (value if math.isfinite(value) else None, token, self._text_of(token))
            for value, token in zip(values, tokens, strict=True)
        ]

    def _text_of(self, token: int) -> str | None:
        if not self.prompt.logprob_texts or self._tokenizer is None:
            return None
        return self._tokenizer.token_text(token)


@dataclass(slots=True)
class _Columns:
    """Logprobs of consecutive positions as `(logprob, id, text or None)`: of the token itself, of the likeliest, and
    of the ids that were asked for."""

    tokens: list[Entry] = field(default_factory=list)
    top: list[list[Entry] | None] = field(default_factory=list)
    chosen: list[list[Entry] | None] = field(default_factory=list)

    def add(
        self, tokens: Sequence[Entry], top: Sequence[list[Entry] | None], chosen: Sequence[list[Entry] | None]
    ) -> None:
        self.tokens += tokens
        self.top += top
        self.chosen += chosen
