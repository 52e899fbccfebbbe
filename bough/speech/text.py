"""What was written of a recording, as segments with times; and these as subtitles."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from bough.core.speech import SAMPLE_RATE, SpeechConfig


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


class Spoken(msgspec.Struct, frozen=True):
    """Tokens of a text, and when it begins and ends, in samples of its window."""

    start: int
    end: int
    tokens: list[int]


def split(tokens: Sequence[int], speech: SpeechConfig, length: int) -> list[Spoken]:
    """The texts between the times in what was written of a window of so many samples."""
    found: list[Spoken] = []
    start, text = 0, list[int]()
    for token in tokens:
        if token < speech.end:
            text.append(token)
        elif token >= speech.timestamps:
            time = min((token - speech.timestamps) * speech.token_samples, length)
            if text:
                found.append(Spoken(start, max(start, time), text))
            start, text = time, []
    return [*found, Spoken(min(start, length), length, text)] if text else found


def compression(text: str) -> float:
    raw = text.encode()
    return len(raw) / len(zlib.compress(raw)) if raw else 1.0


def seconds(samples: int) -> float:
    return round(samples / SAMPLE_RATE, 3)


def clock(time: float, mark: str) -> str:
    """Hours, minutes, seconds and thousandths."""
    whole, thousandths = divmod(round(time * 1000), 1000)
    minutes, rest = divmod(whole, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}{mark}{thousandths:03}"


def srt(segments: Sequence[Segment]) -> str:
    parts = (
        f"{number}\n{clock(each.start, ',')} --> {clock(each.end, ',')}\n{_line(each)}\n\n"
        for number, each in enumerate(segments, 1)
    )
    return "".join(parts)


def vtt(segments: Sequence[Segment]) -> str:
    parts = (f"{clock(each.start, '.')} --> {clock(each.end, '.')}\n{_line(each)}\n\n" for each in segments)
    return "WEBVTT\n\n" + "".join(parts)


def _line(segment: Segment) -> str:
    return segment.text.strip().replace("-->", "->")  # which would begin a cue


def verbose(segments: Sequence[Segment]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(msgspec.structs.replace(each, id=number)) for number, each in enumerate(segments)]
