"""Sound files of every kind, made by another library, and features beside Transformers' own extractor."""

from __future__ import annotations

import io
import struct
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import transformers

from bough.core.errors import RequestError
from bough.core.speech import SpeechConfig
from bough.speech import sound as module
from bough.speech.sound import MINUTE, Window, features, minutes, windows_of


def speech(bins: int) -> SpeechConfig:
    return SpeechConfig({"num_mel_bins": bins, "max_source_positions": 1500}, 0, 0, 0)


def decode(data: bytes) -> np.ndarray:
    return np.concatenate([*minutes(data)])


def tone(seconds: float, rate: int = 16_000) -> np.ndarray:
    return (0.3 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def written(kind: str, rate: int, channels: int = 1) -> bytes:
    out = io.BytesIO()
    sound = np.repeat(tone(1.0, rate)[:, None], channels, axis=1)
    if kind == "mp4":
        with av.open(out, "w", format="mp4") as container:
            stream = container.add_stream("aac", rate=rate, layout="mono")
            frame = av.AudioFrame.from_ndarray(sound[:, :1].T.copy(), format="fltp", layout="mono")
            frame.sample_rate = rate
            for packet in [*stream.encode(frame), *stream.encode(None)]:
                container.mux(packet)
    else:
        soundfile.write(out, sound, rate, format=kind)
    return out.getvalue()


@pytest.mark.parametrize(
    ("kind", "rate", "channels"),
    [
        ("wav", 16_000, 1),
        ("wav", 44_100, 2),
        ("flac", 48_000, 2),
        ("mp3", 22_050, 1),
        ("ogg", 44_100, 1),
        ("mp4", 44_100, 1),
    ],
)
def test_every_kind_of_file_gives_the_same_sound(kind: str, rate: int, channels: int) -> None:
    sound = decode(written(kind, rate, channels))
    assert sound.dtype == np.float32 and abs(len(sound) - 16_000) < 3000  # encoders pad
    middle = sound[4000:12_000]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert abs(spectrum.argmax() * 2 - 440) <= 2 and abs(np.sqrt((middle**2).mean()) - 0.3 / 2**0.5) < 0.02


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "cannot be read"),
        (b"hello, this is no sound" * 100, "cannot be read"),
        (written("flac", 16_000)[:40], "cannot be read|no sound"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n", "cannot be read"),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", "cannot be read"),
    ],
)
def test_what_is_no_sound_is_refused(data: bytes, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        list(windows_of(data, 1500))


@pytest.mark.parametrize("kind", ["flac", "mp3"])
def test_windows_are_the_same_when_a_recording_is_decoded_twice(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, silence = io.BytesIO(), np.zeros(25 * 22_050)
    sound = np.concatenate([silence, tone(40.0, 22_050), silence, tone(1.5, 22_050), silence])
    soundfile.write(out, sound, 22_050, format=kind)
    once = list(windows_of(out.getvalue(), 1500))
    monkeypatch.setattr(module, "SHORT", 0)
    twice = list(windows_of(out.getvalue(), 1500))
    assert len(twice) > len(once), "more minutes were decoded"
    windows = [each for each in twice if isinstance(each, Window)]
    assert windows == [each for each in once if isinstance(each, Window)] and len(windows) == 3
    whole = decode(out.getvalue())
    for window in windows:
        part = np.frombuffer(window.samples, np.float32)
        assert np.array_equal(part, whole[window.start : window.start + len(part)])
        assert len(window.voiced) == -(-len(part) // 320)
    assert max(each for each in twice if isinstance(each, int)) == len(whole)
    assert all(len(each) == MINUTE for each in [*minutes(out.getvalue())][:-1])


@pytest.mark.parametrize("bins", [80, 128])
@pytest.mark.parametrize("seconds", [0.5, 30.0])
def test_features_are_those_of_transformers(bins: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, as its extractor computes without torch: torch's float32 differs by up to 6e-5 between CPUs."""
    monkeypatch.setattr(transformers.models.whisper.feature_extraction_whisper, "is_torch_available", lambda: False)
    noise = np.random.default_rng(0).normal(size=int(seconds * 16_000)).astype(np.float32)
    sound = tone(seconds) + 0.01 * noise
    theirs = transformers.WhisperFeatureExtractor(feature_size=bins)(sound, sampling_rate=16_000, return_tensors="np")
    ours = features(sound, speech(bins))
    assert ours.shape == (bins, 3000) and np.abs(ours - theirs.input_features[0]).max() < 1e-6


def test_titles_that_are_no_text_do_not_matter() -> None:
    plain = written("wav", 16_000)
    title = b"INFOINAM" + struct.pack("<I", 4) + b"\xff\xfe\xfdA"
    titled = plain[:36] + b"LIST" + struct.pack("<I", len(title)) + title + plain[36:]
    assert np.array_equal(decode(titled), decode(plain))


def test_later_releases_of_pyav_are_asked_for_nothing_they_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = av.open

    def later(file: Any, mode: str = "r", *, container_options: dict[str, str]) -> Any:
        return theirs(file, mode, container_options=container_options)

    resampler, threads = av.AudioResampler, list[int]()

    def later_resampler(*, threads: int, found: list[int] = threads, **options: Any) -> Any:
        found.append(threads)
        return resampler(**options)

    monkeypatch.setattr(av, "__version__", "19.0.2")
    monkeypatch.setattr(av, "open", later)
    monkeypatch.setattr(av, "AudioResampler", later_resampler)
    assert len(decode(written("wav", 16_000))) == 16_000
    assert threads == [1], "a thread for each core outlasts the file"
