"""Sound files to samples; samples to windows with voices, and to the features that Whisper hears of each."""

import functools
import itertools
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from bough.core.errors import RequestError
from bough.core.speech import HOP, SAMPLE_RATE, TIME_SAMPLES, SpeechConfig
from bough.multimodal.decoding import samples_of

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
FRAME = 400  # samples that a frame of features is computed from
MINUTE = 60 * SAMPLE_RATE
SHORT = 10 * MINUTE  # a recording whose samples are kept together
BLOCK = 320  # samples whose loudness is one number: 20 ms
STRETCH = 120 * MINUTE // BLOCK  # blocks whose loudness tells voices from noise
MARGIN, PAUSE = 10, 15  # blocks kept around a voice, and over which the quietest place is looked for
SILENCE, ABOVE_NOISE, BELOW_VOICE = -65.0, 10.0, -30.0  # dB


class Window(msgspec.Struct, frozen=True, weakref=True):
    """A part of a recording that the model hears at once."""

    start: int  # in samples of the recording
    samples: bytes  # float32
    voiced: bytes  # of each block whether it is more than silence or steady noise


def minutes(data: bytes) -> Iterator[FloatArray]:
    """The samples of a sound file, one channel at 16 kHz, a minute at a time."""
    try:
        import av
    except ImportError:
        text = "This server cannot read sound files: PyAV is missing. Install it with `pip install 'bough[audio]'`."
        raise RequestError(text, status_code=501) from None
    parts, length = list[FloatArray](), 0
    try:
        for piece in samples_of(data, SAMPLE_RATE, lambda seconds: None):
            parts.append(piece)
            length += len(piece)
            if length >= MINUTE:
                *whole, rest = np.split(np.concatenate(parts), range(MINUTE, length + 1, MINUTE))
                yield from whole
                parts, length = [rest], len(rest)
    except (av.FFmpegError, ValueError) as error:
        formats = "wav, flac, mp3, ogg, m4a, mp4 or webm"
        raise RequestError(f"file cannot be read as sound ({error}); send {formats}.", field="file") from None
    if length:
        yield np.concatenate(parts)


def windows_of(data: bytes, most: int) -> Iterator[Window | int]:
    """Where a recording holds voices, in windows of at most so many blocks. For each minute that is decoded, how many
    samples have been found up to then, which at the end is the recording's length. A long one is decoded twice: voices
    are told from noise by hours, whose samples are not kept."""
    voices, length, kept = Voices(most), 0, list[FloatArray]()
    again: Iterator[FloatArray] | None = None  # the samples once more, for the windows
    held, begin = np.zeros(0, np.float32), 0  # some of them, and where they begin
    for minute in itertools.chain(minutes(data), [None]):
        if minute is not None:
            length += len(minute)
            kept = [*kept, minute] if length <= SHORT else []
            yield length
        elif not length:
            raise RequestError("file holds no sound.", field="file")
        for first, voiced in voices.add(minute):
            again = again or (iter(kept) if kept else minutes(data))
            start, stop = first * BLOCK, (first + len(voiced)) * BLOCK
            while begin + len(held) < stop and (more := next(again, None)) is not None:
                passed = min(len(held), max(0, start - begin))
                held, begin = np.concatenate([held[passed:], more]), begin + passed
                if not kept:
                    yield length
            yield Window(start, held[start - begin : stop - begin].tobytes(), voiced.tobytes())


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


class Voices:
    """Tells voices from silence and steady noise by the loudness of the two hours around them, or of the recording if
    it is shorter, and cuts it into windows of at most `most` blocks."""

    def __init__(self, most: int) -> None:
        self._most, self._first = most, 0  # the first block that is not yet in a window or passed over
        self._level = np.zeros(0)  # of the blocks from there on, in dB
        self._voiced = np.zeros(0, np.bool_)  # of those of them for which that is known

    def add(self, sound: FloatArray | None) -> Iterator[tuple[int, BoolArray]]:
        """The next minute, or the end. Gives the windows that are certain: the first block, and which are voiced."""
        if sound is not None:
            blocks = np.pad(sound, (0, -len(sound) % BLOCK)).reshape(-1, BLOCK).astype(np.float64)
            self._level = np.append(self._level, 10 * np.log10((blocks**2).mean(axis=1) + 1e-12))
        level = self._level[len(self._voiced) :]
        if sound is not None and len(level) <= STRETCH:
            return
        noise, voice = np.percentile(level, (10, 98)).tolist()
        voiced: BoolArray = level > max(SILENCE, min(noise + ABOVE_NOISE, voice + BELOW_VOICE))
        self._voiced = np.append(self._voiced, voiced if sound is None else voiced[: STRETCH // 2])
        while len(places := np.flatnonzero(self._voiced)):
            start, end = max(0, int(places[0]) - MARGIN), len(self._voiced)
            if end - start > self._most:
                latest = start + self._most * 2 // 3  # the quietest place of the last third
                around = np.arange(latest - PAUSE // 2, start + self._most + PAUSE // 2).clip(0, len(self._level) - 1)
                end = latest + int(np.argmin(np.convolve(self._level[around], np.full(PAUSE, 1 / PAUSE), mode="valid")))
            elif sound is not None:
                return
            heard = int(places[places < end][-1]) + 1
            yield self._first + start, self._voiced[start : min(end, heard + MARGIN)]
            self._pass(end)
        self._pass(max(0, len(self._voiced) - MARGIN))

    def _pass(self, blocks: int) -> None:
        self._first += blocks
        self._level, self._voiced = self._level[blocks:], self._voiced[blocks:]
