"""Logprobs of the model's own distribution: raw logits, before temperature, penalties, bias or masks.

Only rows that ask are computed. Positions are worked through in blocks, so that the logits of a long prompt never exist
at once. The copy of a block's results to the host is queued before the next block is computed, so a step in flight need
not wait for them and the device never holds those of all blocks. Nothing is kept between calls.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bough.core.plan import LogprobSpec, PositionLogprobs
from bough.kernels.logits.reference import log_normaliser
from bough.sampling.slots import to_device

INPUT_BLOCK = 256  # positions whose logits exist at once: 150 MiB with a vocabulary of 150,000
OUTPUT_BLOCK = INPUT_BLOCK  # rows whose logits are widened at once


@dataclass(frozen=True, slots=True)
class Scores:
    """Logprobs of some positions, not yet read: the columns of `PositionLogprobs` in host memory, block by block, valid
    once the device has come to this point."""

    blocks: Sequence[tuple[Tensor, ...]]

    def to_host(self) -> PositionLogprobs:
        """The same as numpy arrays; the step must have been waited for."""
        columns = (torch.cat(column).numpy() for column in zip(*self.blocks, strict=True))
        tokens, logprobs, top_logprobs, top_ids, id_logprobs = columns
        return PositionLogprobs(tokens.astype(np.int32), logprobs, top_logprobs, top_ids.astype(np.int32), id_logprobs)


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Logprobs of one step's sampled tokens, not yet read."""

    specs: Sequence[LogprobSpec | None]
    scores: Scores | None  # one position for each spec that is not None

    def read(self) -> list[PositionLogprobs | None]:
        """For each row of the batch what it asked, as a run of one position; the step must have been waited for."""
        if self.scores is None:
            return [None] * len(self.specs)
        host, found = self.scores.to_host(), list[PositionLogprobs | None]([None] * len(self.specs))
        scored = ((place, spec) for place, spec in enumerate(self.specs) if spec is not None)
        for position, (place, spec) in enumerate(scored):
            at = slice(position, position + 1)
            found[place] = PositionLogprobs(
                tokens=host.tokens[at],
                logprobs=host.logprobs[at],
                top_logprobs=host.top_logprobs[at, : spec.top],
                top_ids=host.top_ids[at, : spec.top],
                id_logprobs=host.id_logprobs[at, : len(spec.ids)],
            )
        return found


def output_logprobs(logits: Tensor, tokens: Tensor, specs: Sequence[LogprobSpec | None]) -> PendingLogprobs:
    """Scores the sampled `tokens` [n] under the raw `logits` [n, V], for the rows whose spec is not None."""
    scored = [place for place, spec in enumerate(specs) if spec is not None]
    if not scored:
        return PendingLogprobs(specs, None)
    asked = [spec for spec in specs if spec is not None]
    top, ids = max(spec.top for spec in asked), _padded_ids(asked, logits.device)
    if len(scored) == len(specs) <= OUTPUT_BLOCK:
        return PendingLogprobs(specs, Scores([_score(logits, tokens, top, ids)]))
    places = to_device(np.array(scored, dtype=np.int64), logits.device)
    blocks = [
        _score(logits.index_select(0, block), tokens.index_select(0, block), top, block_ids)
        for block, block_ids in zip(torch.split(places, OUTPUT_BLOCK), torch.split(ids, OUTPUT_BLOCK), strict=True)
    ]
    return PendingLogprobs(specs, Scores(blocks))


def score_inputs(logits_of: Callable[[Tensor], Tensor], hidden: Tensor, targets: Tensor, spec: LogprobSpec) -> Scores:
    """Scores prompt tokens: `targets` [T] int64 under the logits that `logits_of` makes of `hidden` [T, H]."""
    if len(hidden) != len(targets):
        raise ValueError(f"{len(hidden)} hidden states for {len(targets)} targets")
    ids = _padded_ids([spec], hidden.device)
    blocks = [
        _score(logits_of(block), target, spec.top, ids.expand(len(block), -1))
        for block, target in zip(torch.split(hidden, INPUT_BLOCK), torch.split(targets, INPUT_BLOCK), strict=True)
    ]
    return Scores(blocks)


def _score(logits: Tensor, tokens: Tensor, top: int, ids: Tensor) -> tuple[Tensor, ...]:
    """Normalises only the few logits that are asked for."""
    vocab_size = logits.shape[1]
    peak, log_sum = _log_normaliser(logits)
    top_logits, top_ids = logits.topk(min(top, vocab_size), dim=-1)
    id_logprobs = logits.gather(1, ids.clamp(0, vocab_size - 1)).float() - peak - log_sum
    found = (
        tokens,
        (logits.gather(1, tokens[:, None]).float() - peak - log_sum).squeeze(1),
        top_logits.float() - peak - log_sum,
        top_ids,
        # The model cannot say an id that is not in its vocabulary.
        id_logprobs.masked_fill_((ids < 0) | (ids >= vocab_size), -torch.inf),
    )
    return tuple(column.to("cpu", non_blocking=True) for column in found)


def _log_normaliser(logits: Tensor) -> tuple[Tensor, Tensor]:
    if logits.device.type != "cuda":
        return log_normaliser(logits)
    from bough.kernels.logits import triton  # installed only where it has a device to drive

    return triton.log_normaliser(logits)


def _padded_ids(specs: Sequence[LogprobSpec], device: torch.device) -> Tensor:
    """The chosen ids of each spec in one array, short lines filled with token 0. [specs, most ids] int64"""
    width = max(len(spec.ids) for spec in specs)
    lines = [spec.ids + (0,) * (width - len(spec.ids)) for spec in specs]
    return to_device(np.array(lines, dtype=np.int64).reshape(len(specs), width), device)
