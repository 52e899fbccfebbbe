"""From texts to scored choices: which tokens to send, which of their logprobs count, and what comes back.

"is " + "yes" may be tokenised as "is" + " yes". So text and text + choice are tokenised whole. The tokens that count
begin where the first of them differs from the text alone, at the same place for all choices, so that probabilities
after the same tokens are compared. Pure; back ends send the plan in one batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bough.core.errors import RequestError
from bough.lang.backends.base import Scores
from bough.lang.choices import Scored


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """The prompts of one batch: one for each choice, then one for each choice alone where those are needed."""

    prompts: list[list[int]]
    starts: list[int]  # position of each prompt whose successors are scored
    choices: int

    @property
    def request(self) -> dict[str, Any]:
        """The fields of the batch's request; nothing is generated."""
        return {
            "input_ids": self.prompts,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": self.starts,
            "return_text_in_logprobs": True,
        }

    def read(self, outputs: Sequence[dict[str, Any]]) -> Scores:
        """Sorts what came back; a request that was refused refuses the whole choice."""
        metas = [output["meta_info"] for output in outputs]
        for meta in metas:
            reason = meta["finish_reason"] or {}
            if reason.get("type") == "abort":
                raise RequestError(reason.get("message") or "The scoring of a choice was aborted.")
        entries = [meta["input_token_logprobs"] for meta in metas]
        # The first entry is the token before those that are scored.
        tokens = [[_finite(entry) for entry in given[1:]] for given in entries[: self.choices]]
        alone: list[Scored] | None = entries[self.choices :] or None
        return Scores(tokens, alone, metas)


def plan_scoring(text_ids: Sequence[int], full_ids: Sequence[Sequence[int]], *, unconditional: bool) -> ScoringPlan:
    """`text_ids` is the text before the choices, `full_ids` the text with each of them."""
    border = min(_common(text_ids, ids) for ids in full_ids)
    border = min(border, *(len(ids) - 1 for ids in full_ids))
    if border < 1:
        raise RequestError("select() scores its choices after some text; add text to the state before it.")
    alone = [list(ids[border:]) for ids in full_ids] if unconditional else []
    prompts = [list(ids) for ids in full_ids]
    return ScoringPlan(prompts + alone, [border - 1] * len(prompts) + [0] * len(alone), len(prompts))


def normalized(scored: Scored) -> float:
    """The mean logprob of a choice's tokens."""
    return float(np.mean([entry[0] for entry in scored]))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _finite(entry: Sequence[Any]) -> tuple[float, int, str | None]:
    """A token that the model holds for impossible has no number in JSON."""
    logprob, token, text = entry
    return (-math.inf if logprob is None else logprob, token, text)
