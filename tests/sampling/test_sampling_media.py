"""Numbers that stand for images in a prompt are no tokens: penalties pass over them."""

from __future__ import annotations

import numpy as np
import torch

from bough.core.media import MEDIA_ID
from bough.core.plan import RowSetup
from bough.core.sampling_params import SamplingParams
from bough.sampling.sampler import sample
from bough.sampling.state import SamplingState


def test_a_repetition_penalty_passes_over_images() -> None:
    history = np.array([3, MEDIA_ID + 7, 2**31 - 1, 3], dtype=np.int32)
    sampling = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    state = SamplingState(1, 8, "cpu")
    state.setup([RowSetup(0, sampling, 0, (history[:0],), 0, 0, history, 4, None, ())])
    logits = torch.tensor([[0.0, 0.0, 0.0, 1.9, 1.0, 0.0, 0.0, 0.0]])
    assert sample(state, logits, np.zeros(1, dtype=np.int32), None).tokens.tolist() == [4]  # 3 counts half
