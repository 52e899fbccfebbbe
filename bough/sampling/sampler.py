"""One sampling step for a whole batch: logits in, one token per row out.

A batch whose rows are all greedy pays for an argmax. Other needs are met for the rows that have them, as sub-batches
chosen from the host's flags: plain temperature never sorts, filters see only the rows with filters. A row whose logits
are unusable is reported as bad, alone. State lives in `SamplingState`; this module only says what happens when.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from bough.core.plan import IntArray
from bough.sampling.adjust import adjust
from bough.sampling.batch import Part
from bough.sampling.draw import draw, uniform
from bough.sampling.filters import keep_min_p, keep_top, softmax_weights
from bough.sampling.rowwise import best
from bough.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's tokens, still on the device."""

    tokens: Tensor  # [n] int64; 0 where bad
    bad: Tensor  # [n] bool: the logits held NaN or +inf, or no token was possible


def sample(state: SamplingState, logits: Tensor, rows: IntArray) -> Sampled:
    """Draws the next token of each of `rows`, which are distinct, from `logits` [n, V] and counts it in the state.

    Rows with a bias, penalties or barred tokens may be overwritten in `logits`, but never where one of them wants
    logprobs: for those rows `logits` still holds the model's own values afterwards.
    """
    logits = adjust(state, logits, rows)
    peak, tokens = best(logits)
    bad = peak.isfinite().logical_not_()
    random = Part.where(state.flags.random[rows], rows, state.device)
    if random is not None:
        room = state.workspace.lend("part", len(random.numbers), state.vocab_size)
        random.put(tokens, _draw(state, random, random.take(logits, room), random.take(peak)))
    tokens.masked_fill_(bad, 0)
    batch = Part.where(np.ones(len(rows), dtype=np.bool_), rows, state.device)
    if batch is not None:
        state.advance(batch, tokens)
    return Sampled(tokens, bad)


def _draw(state: SamplingState, part: Part, logits: Tensor, peak: Tensor) -> Tensor:
    """Tokens for rows that all draw at random. [part] int64"""
    workspace = state.workspace
    weights = softmax_weights(logits, peak, state.temperature[part.rows], workspace)
    ranked = Part.where(state.flags.ranked[part.numbers], part.numbers, state.device)
    if ranked is not None:
        top_k, top_p = state.top_k[ranked.rows], state.top_p[ranked.rows]
        room = workspace.lend("part", len(ranked.numbers), weights.shape[1])  # the logits in it are used up by now
        ranked.put(weights, keep_top(ranked.take(weights, room), top_k, top_p, state.vocab_size, workspace))
    min_p = Part.where(state.flags.min_p[part.numbers], part.numbers, state.device)
    if min_p is not None:
        room = workspace.lend("part", len(min_p.numbers), weights.shape[1])
        min_p.put(weights, keep_min_p(min_p.take(weights, room), state.min_p[min_p.rows], workspace))
    return draw(weights, uniform(state.seed[part.rows], state.generated[part.rows]))
