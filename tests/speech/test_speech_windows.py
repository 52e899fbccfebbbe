"""Where a recording is cut: in pauses, never leaving a voice out, never sending silence."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bough.speech import sound as module
from bough.speech.sound import ABOVE_NOISE, BELOW_VOICE, BLOCK, MARGIN, MINUTE, PAUSE, SILENCE, Voices

RATE = 16_000
MOST = 1500  # blocks of a window


def voice(seconds: float, seed: int = 0) -> np.ndarray:
    """Noise whose loudness rises and falls like syllables."""
    count = int(seconds * RATE)
    loud = 0.2 * (0.55 + 0.45 * np.sin(2 * np.pi * 4 * np.arange(count) / RATE))
    return (loud * np.random.default_rng(seed).normal(size=count)).astype(np.float32)


def silence(seconds: float) -> np.ndarray:
    return np.random.default_rng(1).normal(scale=1e-4, size=int(seconds * RATE)).astype(np.float32)


def windows(sound: np.ndarray) -> list[slice]:
    return [span for span, _ in heard(sound)]


def heard(sound: np.ndarray) -> list[tuple[slice, list[bool]]]:
    voices, found = Voices(MOST), []
    for part in (*np.split(sound, range(MINUTE, len(sound), MINUTE)), None):
        for first, voiced in voices.add(part):
            span = slice(first * BLOCK, min(len(sound), (first + len(voiced)) * BLOCK))
            found.append((span, voiced.tolist()))
    return found


def heard_at_once(sound: np.ndarray) -> list[tuple[slice, list[bool]]]:
    """The same of a recording that is in memory."""
    blocks = np.pad(sound, (0, -len(sound) % BLOCK)).reshape(-1, BLOCK).astype(np.float64)
    level = 10 * np.log10((blocks**2).mean(axis=1) + 1e-12)
    noise, voice = np.percentile(level, 10), np.percentile(level, 98)
    voiced = level > max(SILENCE, min(noise + ABOVE_NOISE, voice + BELOW_VOICE))
    smooth = np.convolve(np.pad(level, PAUSE // 2, mode="edge"), np.full(PAUSE, 1 / PAUSE), mode="valid")
    found, first, last = [], 0, len(voiced)
    while len(places := np.flatnonzero(voiced[first:]) + first):
        start, end = max(first, int(places[0]) - MARGIN), last
        if last - start > MOST:
            latest = start + MOST * 2 // 3
            end = latest + int(np.argmin(smooth[latest : start + MOST]))
        stop = min(end, int(places[places < end][-1]) + 1 + MARGIN)
        found.append((slice(start * BLOCK, min(stop * BLOCK, len(sound))), voiced[start:stop].tolist()))
        first = end
    return found


def talk(seconds: float, seed: int) -> np.ndarray:
    """Voices and pauses of many lengths and levels."""
    random, parts, length = np.random.default_rng(seed), [], 0.0
    while length < seconds:
        said, pause = random.uniform(0.3, 9), random.choice([0.2, 0.5, 3, 40]) * random.uniform(0.5, 1.5)
        parts += [voice(said, seed) * random.uniform(0.1, 1), silence(pause) * random.uniform(0, 20)]
        length += said + pause
    return np.concatenate(parts)[: int(seconds * RATE)]


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


@pytest.mark.parametrize("seconds", [0.01, 29.99, 60.0, 200.013, 600.0])
def test_windows_are_those_of_the_whole_recording(seconds: float) -> None:
    for seed in range(2):
        sound = talk(seconds, seed)
        assert heard(sound) == heard_at_once(sound)


def test_beyond_two_hours_voices_are_told_by_the_loudness_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hours are twelve minutes here. In the second half there is noise as loud as the voices of the first."""
    monkeypatch.setattr(module, "STRETCH", 12 * MINUTE // BLOCK)
    quiet, loud = [], []
    for seed in range(12):
        quiet += [voice(5.0, seed) * 0.02, silence(115.0)]
        loud += [voice(5.0, seed), silence(115.0) * 20]
    found = in_seconds(windows(np.concatenate([*quiet, *loud])))
    assert [round(start / 120) for start, _ in found] == list(range(24)), "each voice once, and no noise"
    assert all(start % 120 >= 119.7 or start % 120 == 0 for start, _ in found)
    assert all(5.0 <= end % 120 <= 5.3 for _, end in found)


def test_voices_are_not_lost_where_a_stretch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRETCH", 2 * MINUTE // BLOCK)
    found = in_seconds(windows(voice(600.0)))
    assert found[0][0] == 0.0 and found[-1][1] == 600.0
    assert all(later[0] - sooner[1] < 0.3 for sooner, later in itertools.pairwise(found))
    assert all(18 < end - start <= 30.0 for start, end in found[:-1])
