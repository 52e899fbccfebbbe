"""A back end for tests of the frontend language: answers from a script at once, or when it is told to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

from bough.lang.backends.base import Backend, GenOutput, GenRequest
from bough.lang.chat import FORMATS, ChatFormat
from bough.lang.choices import Scores


class ScriptedBackend(Backend):
    """`script` gives the text for a request, or raises; `gate`, if given, holds requests back until it is set."""

    def __init__(
        self,
        script: Callable[[GenRequest], str] = lambda request: "x",
        *,
        chat_format: ChatFormat = FORMATS["chatml"],
        chat_only: bool = False,
        gate: threading.Event | None = None,
    ) -> None:
        super().__init__()
        self.script = script
        self.chat_only = chat_only
        self.requests: list[GenRequest] = []
        self.scored: list[tuple[str, tuple[str, ...]]] = []
        self.cached: list[str] = []
        self.cancelled = 0
        self.open = 0
        self.most_open = 0
        self._gate = gate
        self._chat_format = chat_format

    @property
    def chat_format(self) -> ChatFormat:
        return self._chat_format

    async def generate(self, request: GenRequest) -> GenOutput:
        self.requests.append(request)
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            while self._gate is not None and not self._gate.is_set():
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.open -= 1
        texts = [self.script(request) for _ in range(request.sampling.get("n", 1))]
        return GenOutput(texts, [_meta(request, text) for text in texts])

    async def stream(self, request: GenRequest) -> AsyncIterator[GenOutput]:
        self.requests.append(request)
        text = self.script(request)
        for end in range(1, len(text) + 1):
            await asyncio.sleep(0)
            yield GenOutput([text[:end]], [_meta(request, text[:end])])

    async def score(self, text: str, choices: Sequence[str], *, unconditional: bool) -> Scores:
        """The logprob of a choice's character is minus its place in the alphabet."""
        self.scored.append((text, tuple(choices)))
        tokens = [[(-float(ord(c) - ord("a")), ord(c), c) for c in choice] for choice in choices]
        return Scores(tokens, tokens if unconditional else None, [{"prompt_tokens": 1} for _ in choices])

    async def async_cache_prefix(self, text: str) -> None:
        self.cached.append(text)

    async def async_flush_cache(self) -> bool:
        return True

    async def async_server_info(self) -> dict[str, object]:
        return {"scripted": True}


def _meta(request: GenRequest, text: str) -> dict[str, object]:
    return {"prompt_tokens": len(request.text), "cached_tokens": 0, "completion_tokens": len(text)}
