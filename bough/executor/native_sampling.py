"""Sampling on the native kernels. What requests do to the logits of their rows is torch's part (`sampler.adjust`).

The state of the rows stays in `SamplingState`, so that a row may be in either kind of company from step to step: the
kernels read its columns where they are, and count on. Random numbers are those of (seed, output position), as
everywhere. Between two steps every microsecond of Python is waited for, and code that has left the caches since the
last one is slow: so what does not change is told to the kernels once.
"""

import numpy as np
import torch

from bough.core.plan import IntArray
from bough.executor.verification import Drawn, draw_by_torch
from bough.kernels.quant_linear.packed import aligned_bytes
from bough.native.tape import MAX_VOCABULARY, Sampling, ThreadPool
from bough.sampling.masks import BatchMasks, maskable
from bough.sampling.sampler import adjust
from bough.sampling.state import SamplingState

COLUMNS = ("random", "temperature", "top_k", "top_p", "min_p", "seed", "generated")  # tensors that never move


class NativeSampler:
    """Draws tokens for the rows of a state."""

    def __init__(self, state: SamplingState, pool: ThreadPool) -> None:
        self._state, self._pool = state, pool
        self._fits = state.vocab_size <= MAX_VOCABULARY
        self._rows, self._mask_lines = np.zeros((2, len(state.flags.random)), dtype=np.int32)
        self._scratch = aligned_bytes(pool.sampling_scratch_bytes(state.vocab_size) if self._fits else 0)
        self._job = Sampling(
            vocabulary=state.vocab_size,
            rows=self._rows.ctypes.data,
            scratch=self._scratch.ctypes.data,
            mask_lines=self._mask_lines.ctypes.data,
            **{name: getattr(state.parameters, name).data_ptr() for name in COLUMNS},
        )

    def __call__(self, logits: torch.Tensor, rows: IntArray, masks: BatchMasks | None = None) -> Drawn:
        """The next token of each of `rows` from the first lines of contiguous `logits` [n or more, V]; counts it in the
        state. Rows with masks, or that adjust their logits, may be overwritten there, unless one of them wants
        logprobs."""
        if not self._fits:
            return draw_by_torch(self._state, logits[: len(rows)], rows, masks)
        job, own = self._job, logits[: len(rows)]
        job.masks = None
        adjusts = bool(self._state.flags.adjusted(rows).any())
        logits = own
        if adjusts:
            with torch.inference_mode():
                logits = adjust(self._state, own, rows)
        if masks is not None:
            if logits is own:
                logits = maskable(self._state, own, rows, masks)
            job.masks = masks.words.data_ptr()
            self._mask_lines[: len(rows)] = np.where(masks.masked, masks.masked.cumsum() - 1, -1)
        drawn = Drawn(np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.bool_))
        self._rows[: len(rows)] = rows
        job.count, job.logits = len(rows), logits.data_ptr()
        job.tokens, job.bad = drawn.tokens.ctypes.data, drawn.bad.ctypes.data
        self._pool.sample(job)
        if adjusts:
            with torch.inference_mode():
                self._state.count(rows, torch.from_numpy(drawn.tokens))
        return drawn
