"""The rules by which a row writes down what it hears, beside Transformers' processors on random logits."""

from __future__ import annotations

import random

import pytest
import torch
import transformers
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from bough.core.speech import SpeechConfig
from bough.executor.hearing import keep_rules

SIZES = {"num_mel_bins": 80, "max_source_positions": 60}
SPEECH = SpeechConfig(SIZES, start=41, end=40, timestamps=60, suppress=(2, 41), begin_suppress=(5, 40))
VOCABULARY = 60 + 61


def theirs(logits: torch.Tensor, written: list[int]) -> torch.Tensor:
    config = transformers.GenerationConfig(
        eos_token_id=40, bos_token_id=40, no_timestamps_token_id=59, max_initial_timestamp_index=50
    )
    ruled = logits.clone()
    ruled[list(SPEECH.suppress)] = float("-inf")
    if not written:
        ruled[list(SPEECH.begin_suppress)] = float("-inf")
    return WhisperTimeStampLogitsProcessor(config, begin_index=1)(torch.tensor([[41, *written]]), ruled[None])[0]


@pytest.mark.parametrize("seed", range(40))
def test_what_may_follow_is_what_transformers_allows(seed: int) -> None:
    chosen = random.Random(seed)
    torch.manual_seed(seed)
    written: list[int] = []
    for _ in range(12):
        logits = torch.randn(VOCABULARY)
        logits[60:] += chosen.choice([-5.0, 0.0, 3.0])
        ours = logits.clone()
        keep_rules(ours, SPEECH, written, timed=True)
        assert torch.equal(ours, theirs(logits, written)), written
        allowed = torch.isfinite(ours).nonzero()[:, 0].tolist()
        written.append(chosen.choice(allowed))
        if written[-1] == 40:
            break


def test_without_times_there_are_words_alone() -> None:
    logits = torch.zeros(VOCABULARY)
    keep_rules(logits, SPEECH, [7], timed=False)
    assert torch.isfinite(logits).nonzero()[:, 0].tolist() == [n for n in range(59) if n not in SPEECH.suppress]
