"""What was written of a recording, as segments with times; and these as subtitles."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from bough.core.speech import TIME_SAMPLES, SpeechConfig


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """As OpenAI shows it. Times are in seconds."""

    id: int = 0
    seek: int = 0  # where its window begins, in hundredths of a second
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float = 0.0
    avg_logprob: float = 0.0  # of all tokens of its window
    compression_ratio: float = 1.0  # the same: text that repeats itself has a large one
    no_speech_prob: float = 0.0


def split(tokens: Sequence[int], speech: SpeechConfig, length: int) -> list[tuple[int, int, list[int]]]:
    """The texts between the times in what was written of a window of so many samples: where they begin and end."""
    found: list[tuple[int, int, list[int]]] = []
    start, text = 0, list[int]()
    for token in tokens:
        if token < speech.end:
            text.append(token)
        elif token >= speech.timestamps:
            time = min((token - speech.timestamps) * TIME_SAMPLES, length)
            if text:
                found.append((start, max(start, time), text))
            start, text = time, []
    return [*found, (start, length, text)] if text else found


def compression(text: str) -> float:
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw)) if raw else 1.0


def srt(segments: Sequence[Segment]) -> str:
    return "".join(f"{number}\n{_cue(each, ',')}" for number, each in enumerate(segments, 1))


def vtt(segments: Sequence[Segment]) -> str:
    return "WEBVTT\n\n" + "".join(_cue(each, ".") for each in segments)


def _cue(segment: Segment, mark: str) -> str:
    line = segment.text.strip().replace("-->", "->")  # which would begin a cue
    return f"{_clock(segment.start, mark)} --> {_clock(segment.end, mark)}\n{line}\n\n"


def _clock(time: float, mark: str) -> str:
    whole, thousandths = divmod(round(time * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{mark}{thousandths:03}"
