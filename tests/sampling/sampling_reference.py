"""Slow float64 twins of the sampler's steps, and short ways to build its inputs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from bough.core.plan import LogprobSpec, RowSetup
from bough.core.sampling_params import SamplingParams

Floats = npt.NDArray[np.float64]


def make_setup(
    row: int = 0,
    *,
    seed: int = 0,
    generated: int = 0,
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    logprobs: LogprobSpec | None = None,
    stop_ids: tuple[int, ...] = (),
    **params: Any,
) -> RowSetup:
    history = None if prompt is None else np.array(prompt + (output or []), dtype=np.int32)
    return RowSetup(
        row=row,
        sampling=SamplingParams(**params),
        seed=seed,
        pages=(),
        length=0,
        generated=len(output) if output is not None else generated,
        history=history,
        prompt_len=len(prompt or []),
        logprobs=logprobs,
        stop_ids=stop_ids,
    )


def softmax(logits: Floats) -> Floats:
    powers = np.exp(logits - logits.max())
    return np.asarray(powers / powers.sum())


def kept_tokens(probs: Floats, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    """top-k, then top-p, then min-p, each over what the one before left and made to sum to one again."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept = order[:top_k] if top_k > 0 else order
    total = float(sum(probs[kept]))
    if top_p < 1.0:
        mass, count = 0.0, 0
        while count < len(kept) and mass < top_p * total:
            mass += float(probs[kept[count]])
            count += 1
        kept = kept[:count]
    return {token for token in kept if probs[token] >= min_p * probs[kept[0]]}


def adjusted_logits(logits: Floats, params: SamplingParams, prompt: list[int], output: list[int]) -> Floats:
    """Bias, then repetition, frequency and presence penalties, one token at a time."""
    result = np.array(logits, dtype=np.float64)
    for token, amount in params.logit_bias.items():
        result[token] += amount
    for token in set(prompt) | set(output):
        value = result[token]
        result[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    for token, count in Counter(output).items():
        result[token] -= params.frequency_penalty * count + params.presence_penalty
    return result
