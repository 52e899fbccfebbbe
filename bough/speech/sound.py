"""Sound files to samples, samples to the features that Whisper hears: the same numbers as Transformers' extractor."""

from __future__ import annotations

import functools
import io
import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from bough.core.errors import RequestError
from bough.core.speech import HOP, SAMPLE_RATE, SpeechConfig

FloatArray = npt.NDArray[np.float32]
FRAME = 400  # samples that a frame of features is computed from
MAX_SECONDS = 2 * 3600  # of one recording: half a gigabyte of samples
# Only files that hold their sound themselves: playlists would let FFmpeg open others, and addresses.
FORMATS = "wav,w64,aiff,caf,flac,mp3,aac,ogg,mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,amr,au"
READING = {"format_whitelist": FORMATS, "protocol_whitelist": "none"}


def decode(data: bytes, most_seconds: float = MAX_SECONDS) -> FloatArray:
    """The samples of a sound file, one channel at 16 kHz. Takes long: call it in a thread."""
    try:
        import av
    except ImportError:
        text = "This server cannot read sound files: PyAV is missing. Install it with `pip install 'bough[audio]'`."
        raise RequestError(text, status_code=501) from None
    parts: list[FloatArray] = []
    left = int(most_seconds * SAMPLE_RATE)
    try:
        with av.open(io.BytesIO(data), "r", metadata_errors="ignore", options=READING) as container:
            if not container.streams.audio:
                raise RequestError("file holds no sound.", field="file")
            resampler = av.AudioResampler(format="fltp", rate=SAMPLE_RATE)
            frames: Any = container.decode(container.streams.audio[0])
            for frame in itertools.chain(frames, [None]):  # the last lets the resampler give what it holds
                for piece in resampler.resample(frame):
                    parts.append(piece.to_ndarray().mean(axis=0))
                    left -= len(parts[-1])
                if left < 0:
                    text = f"file is longer than {most_seconds / 60:g} minutes; send it in parts."
                    raise RequestError(text, field="file")
    except (av.FFmpegError, ValueError) as error:
        formats = "wav, flac, mp3, ogg, m4a, mp4, webm"
        raise RequestError(f"file cannot be read as sound ({error}); send {formats}.", field="file") from None
    sound = np.concatenate(parts) if parts else np.zeros(0, dtype=np.float32)
    if not len(sound):
        raise RequestError("file holds no sound.", field="file")
    return np.nan_to_num(sound, posinf=0.0, neginf=0.0).astype(np.float32)


def features(sound: FloatArray, speech: SpeechConfig) -> FloatArray:
    """[mel_bins, frames] of a window, behind whose end there is silence."""
    whole = np.zeros(speech.samples, dtype=np.float64)
    whole[: len(sound)] = sound
    padded = np.pad(whole, FRAME // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[: speech.samples : HOP]
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)
    power = np.abs(np.fft.rfft(frames * window)) ** 2
    levels = np.log10(np.maximum(mel_filters(speech.mel_bins) @ power.T, 1e-10))
    scaled: FloatArray = ((np.maximum(levels, levels.max() - 8.0) + 4.0) / 4.0).astype(np.float32)
    return scaled


@functools.cache
def mel_filters(bins: int) -> npt.NDArray[np.float64]:
    """[bins, FRAME // 2 + 1]: triangles of equal area, their peaks evenly apart on Slaney's mel scale, up to 8 kHz."""
    edges = _mel_to_hertz(np.linspace(0.0, BEND_MEL + np.log(SAMPLE_RATE / 2 / BEND_HERTZ) / STEP, bins + 2))
    points = np.linspace(0.0, SAMPLE_RATE / 2, FRAME // 2 + 1)
    rising = (points - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - points) / np.diff(edges)[1:, None]
    filters = np.maximum(0.0, np.minimum(rising, falling))
    scaled: npt.NDArray[np.float64] = filters * (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return scaled


LINEAR, BEND_MEL, BEND_HERTZ, STEP = 200.0 / 3.0, 15.0, 1000.0, np.log(6.4) / 27.0


def _mel_to_hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Linear up to 1 kHz, logarithmic above."""
    above = BEND_HERTZ * np.exp(STEP * (mels - BEND_MEL))
    hertz: npt.NDArray[np.float64] = np.where(mels < BEND_MEL, LINEAR * mels, above)
    return hertz
