"""Tokens to segments, segments to subtitles."""

from __future__ import annotations

from bough.core.speech import SpeechConfig
from bough.server.openai.audio import srt, vtt
from bough.speech.transcriber import Segment, split

SPEECH = SpeechConfig({"num_mel_bins": 80, "max_source_positions": 1500}, start=41, end=40, timestamps=60)
SECOND = 50  # time tokens


def at(seconds: float) -> int:
    return 60 + round(seconds * SECOND)


def test_texts_stand_between_times() -> None:
    tokens = [at(0), 1, 2, at(1.5), at(2), 3, at(4), 40]
    assert split(tokens, SPEECH, 80_000) == [(0, 24_000, [1, 2]), (32_000, 64_000, [3])]


def test_a_text_without_an_end_goes_on_to_that_of_its_window() -> None:
    assert split([at(0), 1, at(1), at(1), 2], SPEECH, 48_000)[-1] == (16_000, 48_000, [2])
    assert split([1, 2, 40], SPEECH, 48_000) == [(0, 48_000, [1, 2])]
    assert split([at(0), 1, at(9)], SPEECH, 16_000) == [(0, 16_000, [1])], "times end with the sound"
    assert split([at(0), at(1), 40], SPEECH, 16_000) == []


def test_subtitles() -> None:
    segments = [
        Segment(start=0.0, end=1.5, text=" One.", tokens=[1]),
        Segment(start=3661.25, end=3662.0, text=" a --> b", tokens=[2]),
    ]
    assert srt(segments) == ("1\n00:00:00,000 --> 00:00:01,500\nOne.\n\n2\n01:01:01,250 --> 01:01:02,000\na -> b\n\n")
    assert vtt(segments).startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nOne.\n\n01:01:01.250")


def test_times_beyond_a_day() -> None:
    segment = Segment(start=86_400.0 + 3 * 3600 + 62.5, end=100 * 3600 + 0.0004, text=" late", tokens=[1])
    assert srt([segment]) == "1\n27:01:02,500 --> 100:00:00,000\nlate\n\n"
    assert vtt([segment]) == "WEBVTT\n\n27:01:02.500 --> 100:00:00.000\nlate\n\n"
