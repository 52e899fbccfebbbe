"""What has come back for one request so far, and its form for the caller.

Deltas are gathered as they arrive; a reader takes whatever is there when it gets its turn. A slow reader therefore
finds several tokens in one piece instead of a growing queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import numpy as np

from bough.client.inputs import Prompt
from bough.core.finish import FinishAbort, FinishReason, finish_to_dict
from bough.messages.outputs import Delta, LogprobRun, Started
from bough.tokenizer.tokenizer import Tokenizer

Entry = tuple[float | None, int, str | None]


class Answer:
    """One request's output, cumulative. Lives on the client's event loop."""

    def __init__(self, handle: int, prompt: Prompt, tokenizer: Tokenizer | None) -> None:
        self.handle = handle
        self.prompt = prompt
        self.text = ""
        self.ids: list[int] = []
        self.finish: FinishReason | None = None
        self.error: Exception | None = None
        self._tokenizer = tokenizer
        self._started: Started | None = None
        self._retractions = 0
        self._output_logprobs: list[LogprobRun] = []
        self._news = asyncio.Event()
        self._received_at = time.perf_counter()
        self._finished_at: float | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.ids += np.frombuffer(delta.ids, dtype=np.int32).tolist()
        self._output_logprobs += delta.logprobs
        self._started = delta.started or self._started
        if delta.finish is not None:
            self.finish = delta.finish
            self._retractions = delta.retractions
            self._finished_at = time.perf_counter()
        self._news.set()

    def fail(self, error: Exception) -> None:
        """The engine is gone: whoever waits gets the error."""
        self.error = error
        self._news.set()

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    async def progress(self) -> None:
        """Waits until there is something new since the last call; raises if the engine has died."""
        await self._news.wait()
        self._news.clear()
        if self.error is not None and self.finish is None:
            raise self.error

    @property
    def refusal(self) -> FinishAbort | None:
        """Why the engine could not serve the request, if it could not; a caller's own abort is no refusal."""
        refused = isinstance(self.finish, FinishAbort) and self.finish.status_code != 499
        return self.finish if refused else None  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """SGLang's form of an output, complete up to now."""
        shown = {"text": self.text} if self._tokenizer is not None else {}
        return {**shown, "output_ids": list(self.ids), "meta_info": self._meta_info()}

    def _meta_info(self) -> dict[str, Any]:
        started = self._started
        end = self._finished_at or time.perf_counter()
        meta: dict[str, Any] = {
            "id": self.prompt.rid,
            "finish_reason": None if self.finish is None else finish_to_dict(self.finish),
            "prompt_tokens": len(self.prompt.ids),
            "completion_tokens": len(self.ids),
            "cached_tokens": 0 if started is None else started.cached_tokens,
            "num_retractions": self._retractions,
            "queue_time": 0.0 if started is None else started.queue_time_s,
            "e2e_latency": end - self._received_at,
        }
        if self.prompt.logprobs is not None:
            meta.update(self._logprob_fields())
        return meta

    def _logprob_fields(self) -> dict[str, Any]:
        wanted = self.prompt.logprobs
        assert wanted is not None
        # The tokens after a stop string's match were cut; so are their logprobs.
        output = [self._entries(run, wanted.ids) for run in self._output_logprobs[: len(self.ids)]]
        fields: dict[str, Any] = {
            "input_token_logprobs": [],
            "output_token_logprobs": [e for run in output for e in run[0]],
            "output_token_logprobs_length": len(self.ids),
        }
        inputs: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        if wanted.start >= 0:
            first = int(self.prompt.ids[wanted.start])
            inputs = ([(None, first, self._text_of(first))], [None], [None])  # nothing stands before the first token
            if self._started is not None and self._started.input_logprobs is not None:
                tokens, tops, chosen = self._entries(self._started.input_logprobs, wanted.ids)
                inputs = (inputs[0] + tokens, inputs[1] + tops, inputs[2] + chosen)
            fields["input_token_logprobs"] = inputs[0]
        if wanted.top:
            fields["input_top_logprobs"] = inputs[1]
            fields["output_top_logprobs"] = [e for run in output for e in run[1]]
        if wanted.ids:
            fields["input_token_ids_logprobs"] = inputs[2]
            fields["output_token_ids_logprobs"] = [e for run in output for e in run[2]]
        return fields

    def _entries(
        self, run: LogprobRun, ids: tuple[int, ...]
    ) -> tuple[list[Entry], list[list[Entry]], list[list[Entry]]]:
        """(token, top, chosen ids) entries of each position, as `(logprob, id, text or None)`."""
        tokens = np.frombuffer(run.tokens, dtype=np.int32).tolist()
        logprobs = np.frombuffer(run.logprobs, dtype=np.float32).tolist()
        n = len(tokens)
        top_values = np.frombuffer(run.top_logprobs, dtype=np.float32).reshape(n, run.top).tolist()
        top_ids = np.frombuffer(run.top_ids, dtype=np.int32).reshape(n, run.top).tolist()
        chosen = np.frombuffer(run.id_logprobs, dtype=np.float32).reshape(n, len(ids)).tolist()
        return (
            [self._entry(v, t) for v, t in zip(logprobs, tokens, strict=True)],
            [
                [self._entry(v, t) for v, t in zip(vs, ts, strict=True)]
                for vs, ts in zip(top_values, top_ids, strict=True)
            ],
            [[self._entry(v, t) for v, t in zip(vs, ids, strict=True)] for vs in chosen],
        )

    def _entry(self, value: float, token: int) -> Entry:
        return (value if math.isfinite(value) else None, token, self._text_of(token))

    def _text_of(self, token: int) -> str | None:
        if not self.prompt.logprob_texts or self._tokenizer is None:
            return None
        return self._tokenizer.token_text(token)
