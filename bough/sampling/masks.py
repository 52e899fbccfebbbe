"""What grammars allow, applied to the logits of a batch: after everything a request may do to them itself.

Rows without a mask are not touched. Logprobs are of the model's own distribution, so where a masked row wants some, the
mask works on a copy: of the batch on CPUs, of the row on devices (see `adjust`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bough.core.plan import BatchPlan, BoolArray, IntArray, TokenMasks
from bough.sampling.slots import to_device
from bough.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class BatchMasks:
    """The masked rows of a batch."""

    masked: BoolArray  # [n] which rows they are, on the host
    places: Tensor  # [m] int64, the same on the device
    words: Tensor  # [m, words] int32: bit t % 32 of word t // 32 allows token t

    @classmethod
    def on_host(cls, plan: BatchPlan, masks: Callable[[], TokenMasks]) -> BatchMasks | None:
        """Those of a plan's rows that sample, for executors on a CPU; waits for them, if there are to be any."""
        if plan.masked is None:
            return None
        masked = plan.masked[plan.sample]
        return cls(masked, torch.from_numpy(np.flatnonzero(masked)), torch.from_numpy(masks().words))

    def among(self, chosen: BoolArray, *, renumber: bool) -> BatchMasks | None:
        """The masks of those rows of the batch [n] that are chosen, if any; `renumber` counts places among these."""
        masked = self.masked & chosen
        if not masked.any():
            return None
        if not renumber and masked.sum() == len(self.places):
            return self
        places = np.flatnonzero(masked[chosen] if renumber else masked)
        lines = np.flatnonzero(chosen[self.masked])
        at, of = to_device(np.stack((places, lines)), self.places.device)
        return BatchMasks(masked[chosen] if renumber else masked, at, self.words.index_select(0, of))


def maskable(state: SamplingState, logits: Tensor, rows: IntArray, masks: BatchMasks) -> Tensor:
    """The model's own logits, or a copy where a masked row wants logprobs of them."""
    return logits.clone() if (masks.masked & state.flags.logprobs[rows]).any() else logits
