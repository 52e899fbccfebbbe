"""Cuts a recording into windows that a model hears at once: by loudness, in pauses where there are some."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bough.core.speech import SAMPLE_RATE, SpeechConfig
from bough.speech.sound import FloatArray

BLOCK = 320  # samples whose loudness is one number: 20 ms
MARGIN = 10  # blocks kept before and behind a voice
PAUSE = 15  # blocks over which the quietest place is looked for
SILENCE, ABOVE_NOISE, BELOW_VOICE = -65.0, 10.0, -30.0  # dB


class Loudness:
    """Of a recording, block by block, and which blocks hold more than silence or steady noise."""

    def __init__(self, sound: FloatArray) -> None:
        blocks = np.pad(sound, (0, -len(sound) % BLOCK)).reshape(-1, BLOCK).astype(np.float64)
        level = 10 * np.log10((blocks**2).mean(axis=1) + 1e-12)
        noise, voice = np.percentile(level, 10), np.percentile(level, 98)
        self.voiced: npt.NDArray[np.bool_] = level > max(SILENCE, min(noise + ABOVE_NOISE, voice + BELOW_VOICE))
        smooth = np.convolve(np.pad(level, PAUSE // 2, mode="edge"), np.full(PAUSE, 1 / PAUSE), mode="valid")
        self.smooth = smooth

    def cut(self, first: int, last: int, most: int) -> list[tuple[int, int]]:
        """Windows of at most so many blocks that hold all voices between two blocks."""
        found = []
        while len(voiced := np.flatnonzero(self.voiced[first:last])):
            start = max(first, first + int(voiced[0]) - MARGIN)
            end = last
            if last - start > most:
                latest = range(start + most * 2 // 3, start + most)  # the quietest place of the last third
                end = latest[int(np.argmin(self.smooth[latest.start : latest.stop]))]
            heard = first + int(voiced[voiced < end - first][-1]) + 1
            found.append((start, min(end, heard + MARGIN)))
            first = end
        return found


def windows(sound: FloatArray, speech: SpeechConfig) -> list[slice]:
    """Where a recording holds voices, in parts that the model hears at once. In samples."""
    loudness = Loudness(sound)
    found = loudness.cut(0, len(loudness.voiced), speech.samples // BLOCK)
    return [slice(start * BLOCK, min(end * BLOCK, len(sound))) for start, end in found]


def voiced_seconds(sound: FloatArray) -> float:
    return float(Loudness(sound).voiced.sum() * BLOCK / SAMPLE_RATE)
