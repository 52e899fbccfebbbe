"""Vocabulary-wide work goes in blocks of rows, and how many rows a block has changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sampling_reference import make_setup

from bough.sampling import adjust
from bough.sampling.batch import Part
from bough.sampling.state import SamplingState

VOCAB_SIZE = 50
EVERYTHING = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.1, "logit_bias": {3: 2.0}}


def adjusted(kinds: list[dict[str, object]]) -> torch.Tensor:
    state = SamplingState(len(kinds), VOCAB_SIZE, "cpu")
    state.setup([make_setup(row, prompt=[row, 4], output=[row, row, 7], **kind) for row, kind in enumerate(kinds)])
    logits = torch.randn(len(kinds), VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    return adjust.adjust(state, logits, np.arange(len(kinds), dtype=np.int32))


@pytest.mark.parametrize("kinds", [[EVERYTHING] * 7, [EVERYTHING, {}, EVERYTHING, {"logit_bias": {1: -3.0}}, {}] * 2])
def test_blocks_of_rows_are_adjusted_as_the_whole(
    kinds: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = adjusted(kinds)
    for size in (1, 2, 3):
        monkeypatch.setattr(adjust, "ADJUST_BLOCK", size)
        torch.testing.assert_close(adjusted(kinds), expected, rtol=0, atol=0)


@pytest.mark.parametrize("mask", [[True] * 5, [True, False, True, True, False]])
def test_blocks_cover_a_part_once(mask: list[bool]) -> None:
    part = Part.where(np.array(mask), np.arange(10, 15, dtype=np.int32), torch.device("cpu"))
    assert part is not None
    batch = torch.arange(5)
    blocks = list(part.blocks(2))
    assert all(len(block.numbers) <= 2 for block in blocks)
    assert [n for block in blocks for n in block.numbers.tolist()] == part.numbers.tolist()
    assert [n for block in blocks for n in block.take(batch).tolist()] == part.take(batch).tolist()
