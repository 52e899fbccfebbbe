"""The benchmark of structured output: its masks' part, on a small vocabulary."""

from __future__ import annotations

import random

from tests.bench.constrained import made_up_vocabulary, measure_masks


def test_masks_of_a_few_requests() -> None:
    figures = measure_masks("llguidance", requests=2, vocabulary_size=400, seed=1)
    assert figures["mask_requests"] == 2 and figures["mask_vocabulary"] == 400
    assert figures["mask_steps"] > 50 and figures["mask_step_us_p99"] >= figures["mask_step_us_median"] > 0


def test_a_made_up_vocabulary_has_every_byte_and_one_end() -> None:
    vocabulary = made_up_vocabulary(500, random.Random(0))
    assert vocabulary.size == 500 and vocabulary.stop_ids == (499,)
    assert set(vocabulary.pieces[:256]) == {bytes([byte]) for byte in range(256)} and vocabulary.pieces[499] == b""
