"""Sampling on the native kernels, for rows that are greedy or have a temperature and nothing else; others use torch.

The state of the rows stays in `SamplingState`, so that a row may be in either kind of company from step to step. Random
numbers are those of (seed, output position), as everywhere.
"""

from __future__ import annotations

import numpy as np
import torch

from bough.core.plan import IntArray
from bough.kernels.sampling.uniform import uniform
from bough.native.tape import MAX_VOCABULARY, Crew, Sampling
from bough.sampling.sampler import Sampled, sample
from bough.sampling.state import SamplingState


class NativeSampler:
    """Draws tokens for the rows of a state."""

    def __init__(self, state: SamplingState, crew: Crew) -> None:
        self._state, self._crew = state, crew
        self._flags = state.flags
        self._fits = state.vocab_size <= MAX_VOCABULARY
        # The same memory as the state's tensors, which never move: numpy takes a few rows out in less time.
        self._temperature, self._generated = state.temperature.numpy(), state.generated.numpy()

    def __call__(self, logits: torch.Tensor, rows: IntArray) -> Sampled:
        """The next token of each of `rows` from contiguous `logits` [n, V]; counts it in the state."""
        if not self._fits or not self._state.plain(rows):
            return sample(self._state, logits, rows)
        tokens, bad = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.bool_)
        random = self._flags.random[rows]
        temperatures, numbers = np.zeros(len(rows), dtype=np.float32), np.zeros(0, dtype=np.float64)
        if random.any():
            temperatures[random] = self._temperature[rows[random]]
            at = torch.from_numpy(rows.astype(np.int64))
            numbers = uniform(self._state.seed[at], self._state.generated[at]).numpy()
        job = Sampling(
            count=len(rows),
            vocabulary=logits.shape[1],
            logits=logits.data_ptr(),
            temperatures=temperatures.ctypes.data,
            numbers=numbers.ctypes.data,
            tokens=tokens.ctypes.data,
            bad=bad.ctypes.data,
        )
        self._crew.sample(job)
        self._generated[rows] += 1
        return Sampled(torch.from_numpy(tokens), torch.from_numpy(bad))
