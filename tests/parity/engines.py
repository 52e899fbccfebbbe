"""Engines for comparisons: whole ones, as the golden file was made (the default model in fp32, nothing kept quantised),
and scheduler and executor alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bough
from bough.core.media import MediaPrompt
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.loader.locate import locate
from bough.messages.requests import LogprobRequest
from bough.scheduler.adapters import Adapters
from bough.scheduler.loop import Scheduler
from bough.scheduler.ngram import NgramProposer
from tests.fakes.boxes import FakeInbox, FakeOutbox, generate

ROOMY_TOKENS = 12288  # holds all golden samples with their outputs, twice over


@contextmanager
def fp32_engine(**settings: Any) -> Iterator[bough.Engine]:
    """An engine that is shut down at the end of the block; `settings` lie over those of the golden file."""
    base = {"dtype": "float32", "quantization": "none", "max_total_tokens": ROOMY_TOKENS}
    with bough.Engine(**{**base, **settings}) as engine:
        yield engine


class LocalEngine:
    """Scheduler and executor in this process; `ask` gives the output and how many tokens of the prompt were cached."""

    def __init__(self, folder: Path, *, new: int, **flags: object) -> None:
        settings = Settings.from_flat({"context_length": 256, "chunked_prefill_size": 16, **flags})
        loaded = build_executor(locate(str(folder)), settings)
        self.executor, self.limits = loaded.executor, loaded.executor.limits()
        self.inbox, self.out = FakeInbox(), FakeOutbox()
        self.adapters = Adapters(loaded.executor, settings.lora) if settings.lora.enable_lora else None
        self.scheduler = Scheduler(
            loaded.executor,
            self.inbox,
            self.out,
            memory=settings.memory,
            settings=settings.scheduler,
            adapters=self.adapters,
            proposer=NgramProposer(settings.speculative) if settings.speculative.speculative_algorithm else None,
        )
        self._handles, self._new = 0, new

    def ask(
        self,
        *prompts: list[int],
        logprobs: LogprobRequest | None = None,
        adapters: Sequence[str] = (),
        media: Sequence[MediaPrompt | None] = (),
    ) -> list[tuple[list[int], int]]:
        """`adapters` and `media` are those of the prompts; none have any when left out."""
        handles = range(self._handles, self._handles + len(prompts))
        self._handles += len(prompts)
        options = {"max_new_tokens": self._new, "temperature": 0.0, "ignore_eos": True, "logprobs": logprobs}
        chosen = adapters or [""] * len(prompts)
        given = zip(handles, prompts, chosen, media or [None] * len(prompts), strict=True)
        self.inbox.pending += [generate(h, prompt, adapter=name, media=m, **options) for h, prompt, name, m in given]
        while not all(handle in self.out.ended for handle in handles):
            self.scheduler.turn()
            assert not self.scheduler._batch.audit().problems
        return [(self.out.outputs[handle], self.out.started[handle].cached_tokens) for handle in handles]
