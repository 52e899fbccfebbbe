"""Where a recording is cut: in pauses, never leaving a voice out, never sending silence."""

from __future__ import annotations

import itertools

import numpy as np

from bough.core.speech import SpeechConfig
from bough.speech.sound import Loudness

SPEECH = SpeechConfig({"num_mel_bins": 80, "max_source_positions": 1500}, 0, 0, 0)
RATE = 16_000


def voice(seconds: float, seed: int = 0) -> np.ndarray:
    """Noise whose loudness rises and falls like syllables."""
    count = int(seconds * RATE)
    loud = 0.2 * (0.55 + 0.45 * np.sin(2 * np.pi * 4 * np.arange(count) / RATE))
    return (loud * np.random.default_rng(seed).normal(size=count)).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.random.default_rng(1).normal(scale=1e-4, size=int(seconds * RATE)).astype(np.float32)


def windows(sound: np.ndarray) -> list[slice]:
    return Loudness(sound).windows(SPEECH)


def in_seconds(found: list[slice]) -> list[tuple[float, float]]:
    return [(each.start / RATE, each.stop / RATE) for each in found]


def test_silence_is_not_heard() -> None:
    assert windows(np.zeros(20 * RATE, dtype=np.float32)) == []
    assert windows(silence(20.0)) == []


def test_a_voice_is_one_window_with_a_little_around_it() -> None:
    ((start, end),) = in_seconds(windows(np.concatenate([silence(10), voice(5), silence(10)])))
    assert 9.7 <= start <= 10.0 and 15.0 <= end <= 15.3


def test_long_recordings_are_cut_in_pauses() -> None:
    parts = [part for seed in range(8) for part in (voice(8.0, seed), silence(0.6))]
    found = in_seconds(windows(np.concatenate(parts)))
    assert len(found) >= 3 and all(end - start <= 30.0 for start, end in found)
    for _, end in found[:-1]:
        assert end % 8.6 >= 7.75 or end % 8.6 <= 0.25, "the cut is in a pause"
    covered = sum(
        min(end, 8.6 * n + 8) - max(start, 8.6 * n)
        for start, end in found
        for n in range(8)
        if start < 8.6 * n + 8 and end > 8.6 * n
    )
    assert covered > 64 - 0.1


def test_a_voice_without_pauses_is_cut_all_the_same() -> None:
    found = in_seconds(windows(voice(75.0)))
    assert found[0][0] == 0.0 and found[-1][1] == 75.0
    assert all(later[0] == sooner[1] or later[0] - sooner[1] < 0.3 for sooner, later in itertools.pairwise(found))
    assert all(end - start <= 30.0 for start, end in found)
