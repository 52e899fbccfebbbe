"""`bough serve whisper-tiny.en`, with its real weights and a real voice, through OpenAI's own client."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from bough.core.files import home
from bough.loader import fetch
from tests.bench.speech import BECKETT, errors
from tests.system.serving import running

VOICE = fetch.WheelFile(
    package="moonshine-voice",
    version="0.0.48",
    member="moonshine_voice/assets/beckett.wav",
    size=318_978,
    sha256="e5a26b3d29e5b0bc8dbd72c11d16a3808a4ec0ac45b21f12a27d2a2fe5c5ae61",
    wheel_size=57_646_049,
)


@pytest.mark.slow
def test_a_voice_is_written_down() -> None:
    path = fetch.install(VOICE, home() / "test-voices", progress=False, download=fetch.pip_download)
    with running("whisper-tiny.en") as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert "/v1/audio/transcriptions -F file=@" in server.welcome

        def asked(**options: Any) -> Any:
            return client.audio.transcriptions.create(model="whisper-tiny.en", file=Path(path), **options)

        whole = asked(response_format="verbose_json")
        assert errors(BECKETT, whole.text)[0] <= 1 and whole.language == "en"
        assert 9 < whole.duration < 11 and 0 <= whole.segments[0].start < whole.segments[-1].end <= whole.duration
        words = asked(response_format="verbose_json", timestamp_granularities=["word"]).words
        assert " ".join(each.word for each in words) == whole.text
        assert all(each.start <= each.end for each in words) and words[-1].end <= whole.duration
        again = [each for each in words if each.word.lower().startswith("again")]
        assert abs(again[0].start - 5.2) < 0.3, "where faster-whisper finds it, too"
        found: list[str] = []
        threads = [threading.Thread(target=lambda: found.append(asked().text)) for _ in range(3)]
        for thread in threads:
            thread.start()
        events = list(asked(stream=True))
        for thread in threads:
            thread.join()
        assert found == [whole.text] * 3, "in company as alone"
        assert errors(BECKETT, events[-1].text)[0] <= 1
        assert "".join(event.delta for event in events[:-1]) == events[-1].text
