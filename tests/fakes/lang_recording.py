"""How much of a program's prompts was reused, and how much could have been: a back end that keeps its own books."""

from __future__ import annotations

from typing import Any

import bough as sgl
from bough.lang.backends.base import GenOutput, GenRequest
from bough.lang.backends.endpoint import EngineBackend
from bough.lang.choices import Scores


class Recording(EngineBackend):
    """Remembers what was sent, in order, and what was found in the cache."""

    def __init__(self, engine: sgl.Engine) -> None:
        super().__init__(engine)
        self.sent: list[tuple[str, str, bool]] = []  # prompt, output, whether it counts
        self.prompt_tokens = self.cached_tokens = 0

    async def generate(self, request: GenRequest) -> GenOutput:
        place = len(self.sent)
        self.sent.append((request.text, "", True))
        output = await super().generate(request)
        self.sent[place] = (request.text, output.texts[0], True)
        self._count(output.metas)
        return output

    async def score(self, text: str, choices: Any, *, unconditional: bool) -> Scores:
        self.sent += [(text + choice, "", True) for choice in choices]
        scores = await super().score(text, choices, unconditional=unconditional)
        self._count(scores.metas)
        return scores

    async def async_cache_prefix(self, text: str) -> None:
        self.sent.append((text, "", False))
        await super().async_cache_prefix(text)

    def _count(self, metas: list[dict[str, Any]]) -> None:
        self.prompt_tokens += sum(meta["prompt_tokens"] for meta in metas)
        self.cached_tokens += sum(meta["cached_tokens"] for meta in metas)

    def best_share(self, encode: Any) -> float:
        """Of the prompt tokens, those that an earlier request had already brought; the last is always computed."""
        tree: dict[int, Any] = {}
        total = found = 0
        for text, output, counts in self.sent:
            ids = encode(text)
            node, length = tree, 0
            while length < len(ids) and ids[length] in node:
                node, length = node[ids[length]], length + 1
            total += len(ids) * counts
            found += min(length, len(ids) - 1) * counts
            node = tree
            for token in ids + encode(output):
                node = node.setdefault(token, {})
        return found / total


def share_of(recording: Recording, engine: sgl.Engine) -> tuple[float, float]:
    assert engine.tokenizer is not None
    return recording.cached_tokens / recording.prompt_tokens, recording.best_share(engine.tokenizer.encode)
