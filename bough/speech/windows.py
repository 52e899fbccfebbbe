"""Cuts a recording into windows that a model hears at once: by loudness, in pauses where there are some."""

from __future__ import annotations

import numpy as np

from bough.core.speech import SAMPLE_RATE, SpeechConfig
from bough.speech.sound import FloatArray

BLOCK = 320  # samples whose loudness is one number: 20 ms
MARGIN = 10  # blocks kept before and behind a voice
PAUSE = 15  # blocks over which the quietest place is looked for
SILENCE, ABOVE_NOISE, BELOW_VOICE = -65.0, 10.0, -30.0  # dB


class Loudness:
    """Of a recording, block by block, and which blocks hold more than silence or steady noise."""

    def __init__(self, sound: FloatArray) -> None:
        self._length = len(sound)
        blocks = np.pad(sound, (0, -len(sound) % BLOCK)).reshape(-1, BLOCK).astype(np.float64)
        level = 10 * np.log10((blocks**2).mean(axis=1) + 1e-12)
        noise, voice = np.percentile(level, 10), np.percentile(level, 98)
        self._voiced = level > max(SILENCE, min(noise + ABOVE_NOISE, voice + BELOW_VOICE))
        self._smooth = np.convolve(np.pad(level, PAUSE // 2, mode="edge"), np.full(PAUSE, 1 / PAUSE), mode="valid")

    def windows(self, speech: SpeechConfig) -> list[slice]:
        """Where the recording holds voices, in parts that the model hears at once. In samples."""
        found, first, last, most = list[slice](), 0, len(self._voiced), speech.samples // BLOCK
        while len(voiced := np.flatnonzero(self._voiced[first:]) + first):
            start, end = max(first, int(voiced[0]) - MARGIN), last
            if last - start > most:
                latest = start + most * 2 // 3  # the quietest place of the last third
                end = latest + int(np.argmin(self._smooth[latest : start + most]))
            heard = int(voiced[voiced < end][-1]) + 1
            found.append(slice(start * BLOCK, min(min(end, heard + MARGIN) * BLOCK, self._length)))
            first = end
        return found

    def voiced_seconds(self, span: slice) -> float:
        return float(self._voiced[span.start // BLOCK : span.stop // BLOCK].sum() * BLOCK / SAMPLE_RATE)
