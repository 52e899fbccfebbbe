# mypy: disable-error-code="import-untyped"
"""Fails if a kernel of a running engine would have to be compiled after the rehearsal and the quiet moments behind it.

Triton compiles a kernel anew for counts that are 1 or multiples of 16, unless it is told not to. Here nothing is
compiled: launches are stopped where the compiler would be asked, and what they would ask for is noted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before any kernel is defined
sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from bough.executor.warm_up import rare_pieces
from bough.kernels.logits.triton import count_tokens_, forbid_tokens_, log_normaliser, penalise
from bough.kernels.rms_norm.triton import rms_norm
from bough.kernels.sampling.triton import sample_rows
from bough.sampling.state import SamplingState
from tests.kernels.compile_all import AbsentDevice

VOCABULARY, HIDDEN = 151_936, 1024
BATCHES = (1, 2, 8, 16, 27, 28, 32, 100, 256, 512)
LENGTHS = (129, 144, 500, 1500, 1501, 2048, 2049, 4000, 8192)


def note_compilations() -> set[tuple[str, str]]:
    """From here on a launch only adds to this set what would be compiled for it."""
    driver.set_active(AbsentDevice(GPUTarget("cuda", 90, 32)))
    noted: set[tuple[str, str]] = set()

    def note(*, key: str, fn: Any, **more: Any) -> bool:
        noted.add((fn.name, key))
        return True

    triton.knobs.runtime.jit_cache_hook = note
    return noted


def sample_any(dtype: torch.dtype) -> None:
    state = SamplingState(max(BATCHES), VOCABULARY, "cpu")
    for n in BATCHES:
        logits, rows = torch.empty((n, VOCABULARY), dtype=dtype), torch.arange(n)
        sample_rows(logits, rows, state.parameters, filtered=True)
        lines = state.penalty_lines(np.arange(n), np.arange(n, dtype=np.int32))
        own = penalise(logits, lines, state.penalties)
        for filtered in (True, False):
            tokens, _ = sample_rows(own, lines.rows, state.parameters, filtered)
        count_tokens_(state.penalties.counts, lines.count_slots, tokens)
        log_normaliser(logits)
        forbid_tokens_(logits, torch.empty((n, -(-VOCABULARY // 32)), dtype=torch.int32), rows)


def normalise(tokens: int) -> None:
    x = torch.empty((tokens, HIDDEN), dtype=torch.bfloat16)
    rms_norm(x, x[0], 1e-5, x.clone())


if __name__ == "__main__":
    noted = note_compilations()
    for piece in rare_pieces(VOCABULARY, torch.bfloat16, torch.device("cpu")):
        piece()
    for tokens in (8704, 1499):  # the rehearsal's largest step, and the one behind it
        normalise(tokens)
    before = set(noted)
    rare = {"gather_kernel", "pick_kernel", "_penalise", "_count", "_normalise", "_forbid"}
    assert {name.split(".")[-1] for name, _ in before} > rare
    for dtype in (torch.bfloat16, torch.float32):
        sample_any(dtype)
    for tokens in LENGTHS:
        normalise(tokens)
    late = sorted(noted - before)
    assert not late, f"compiled too late: {late}"
    print("nothing is compiled late")
