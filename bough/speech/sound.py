"""Sound files to samples; samples to windows with voices, and to the features that Whisper hears of each."""

import functools

import numpy as np
import numpy.typing as npt

from bough.core.errors import RequestError
from bough.core.speech import HOP, SAMPLE_RATE, TIME_SAMPLES, SpeechConfig
from bough.multimodal.decoding import samples_of

FloatArray = npt.NDArray[np.float32]
FRAME = 400  # samples that a frame of features is computed from
MAX_SECONDS = 2 * 3600  # of one recording: half a gigabyte of samples
BLOCK = 320  # samples whose loudness is one number: 20 ms
MARGIN, PAUSE = 10, 15  # blocks kept around a voice, and over which the quietest place is looked for
SILENCE, ABOVE_NOISE, BELOW_VOICE = -65.0, 10.0, -30.0  # dB


def decode(data: bytes, most_seconds: float = MAX_SECONDS) -> FloatArray:
    """The samples of a sound file, one channel at 16 kHz. Takes long: call it in a thread."""
    try:
        import av
    except ImportError:
        text = "This server cannot read sound files: PyAV is missing. Install it with `pip install 'bough[audio]'`."
        raise RequestError(text, status_code=501) from None

    def check_seconds(seconds: float) -> None:
        if seconds > most_seconds:
            raise RequestError(f"file is longer than {most_seconds / 60:g} minutes; send parts.", field="file")

    try:
        parts = [*samples_of(data, SAMPLE_RATE, check_seconds)]
    except RequestError:
        raise
    except (av.FFmpegError, ValueError) as error:
        formats = "wav, flac, mp3, ogg, m4a, mp4 or webm"
        raise RequestError(f"file cannot be read as sound ({error}); send {formats}.", field="file") from None
    if not any(map(len, parts)):
        raise RequestError("file holds no sound.", field="file")
    return np.concatenate(parts)


def features(sound: FloatArray, speech: SpeechConfig) -> FloatArray:
    """[mel bins, frames] of a window, behind whose end there is silence: as Transformers' extractor has them."""
    whole = np.zeros(speech.positions * TIME_SAMPLES, dtype=np.float64)
    whole[: len(sound)] = sound
    padded = np.pad(whole, FRAME // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[: len(whole) : HOP]
    power = np.abs(np.fft.rfft(frames * (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)))) ** 2
    levels = np.log10(np.maximum(mel_filters(speech.encoder["num_mel_bins"]) @ power.T, 1e-10))
    scaled: FloatArray = ((np.maximum(levels, levels.max() - 8.0) + 4.0) / 4.0).astype(np.float32)
    return scaled


@functools.cache
def mel_filters(bins: int) -> npt.NDArray[np.float64]:
    """[bins, FRAME // 2 + 1]: triangles of equal area, their peaks evenly apart on Slaney's mel scale, up to 8 kHz."""
    step, bend = np.log(6.4) / 27.0, 15.0  # linear up to 1 kHz, logarithmic above
    mels = np.linspace(0.0, bend + np.log(SAMPLE_RATE / 2 / 1000.0) / step, bins + 2)
    edges = np.where(mels < bend, 200.0 / 3.0 * mels, 1000.0 * np.exp(step * (mels - bend)))
    points = np.linspace(0.0, SAMPLE_RATE / 2, FRAME // 2 + 1)
    rising = (points - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - points) / np.diff(edges)[1:, None]
    areas = 2.0 / (edges[2:] - edges[:-2])[:, None]
    return np.asarray(areas * np.maximum(0.0, np.minimum(rising, falling)), dtype=np.float64)


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
        found, first, last, most = list[slice](), 0, len(self._voiced), speech.positions * TIME_SAMPLES // BLOCK
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
