"""Logprobs as clients see them: unpacked once, when they come, into columns that readers slice.

Every piece of a cumulative stream shows all entries again, and a delta stream only the newest; both take slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bough.messages.outputs import LogprobRun

Entry = tuple[float | None, int, str | None]  # logprob (None where there is none), token id, its text if asked for


@dataclass(slots=True)
class LogprobColumns:
    """Logprobs of consecutive positions: of the token itself, of the likeliest, and of the ids that were asked for.
    Slice i of each column belongs to token i."""

    tokens: list[Entry] = field(default_factory=list)
    top: list[list[Entry] | None] = field(default_factory=list)
    chosen: list[list[Entry] | None] = field(default_factory=list)

    def add_first(self, token: int, text_of: Callable[[int], str | None]) -> None:
        """The first prompt token, before which nothing stands."""
        self.tokens.append((None, token, text_of(token)))
        self.top.append(None)
        self.chosen.append(None)

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
