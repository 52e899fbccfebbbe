"""Recordings are decoded in processes, whose end is nobody else's."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile

from bough.core.errors import RequestError
from bough.core.pipe_process import ProcessPool
from bough.speech import decoder
from bough.speech.decoder import read_answer
from bough.speech.sound import SAMPLE_RATE, Window, windows_of

HELLO, LONG = (msgspec.msgpack.encode((1500, goes_on)) for goes_on in (False, True))


def wav(seconds: float) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, np.sin(np.arange(int(seconds * SAMPLE_RATE)) / 20), SAMPLE_RATE, format="wav")
    return out.getvalue()


def test_a_process_gives_what_decoding_here_gives_and_another_takes_its_place_when_it_ends() -> None:
    pool = ProcessPool("bough.speech.decoder", HELLO, 1)
    try:
        pool.warm()
        assert read_answer(pool.exchange(wav(2.0), 60.0)) == [*windows_of(wav(2.0), 1500), None]
        with pytest.raises(RequestError, match="cannot be read as sound") as caught:
            read_answer(pool.exchange(b"nothing that sounds", 60.0))
        assert caught.value.field == "file" and caught.value.status_code == 400
        for number, innocent in ((signal.SIGKILL, True), (signal.SIGSEGV, False)):
            (process,) = pool._running
            os.kill(process._process.pid, number)  # by somebody else, or by what it decodes
            if not innocent:
                with pytest.raises(RequestError, match="too much memory, to decode; cut it"):
                    read_answer(pool.exchange(wav(1.0), 60.0))
            assert SAMPLE_RATE in read_answer(pool.exchange(wav(1.0), 60.0))
    finally:
        pool.close()


def test_a_place_whose_next_process_did_not_start_is_filled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProcessPool("bough.speech.decoder", HELLO, 1)
    try:
        pool.warm()
        (process,) = pool._running
        os.kill(process._process.pid, signal.SIGKILL)
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_module", "bough.nothing_of_this_name")
            with pytest.raises(ChildProcessError, match="did not start"):
                pool.exchange(wav(1.0), 60.0)
        assert SAMPLE_RATE in read_answer(pool.exchange(wav(1.0), 60.0))
    finally:
        pool.close()


def test_the_status_of_a_reason_comes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(file: bytes, blocks: int) -> Iterator[Window]:
        raise RequestError("PyAV is missing.", status_code=501)
        yield

    monkeypatch.setattr(decoder, "windows_of", missing)
    with pytest.raises(RequestError, match="PyAV is missing") as caught:
        read_answer(decoder.answering(1500, goes_on=False)(b"file"))
    assert caught.value.status_code == 501


def flac(hours: float, places: list[float]) -> bytes:
    """Silence, and two seconds of a tone at each of these seconds."""
    out, at = io.BytesIO(), 0
    with soundfile.SoundFile(out, "w", SAMPLE_RATE, 1, format="flac") as file:
        for place in (*places, hours * 3600):
            for begin in range(at, int(place * SAMPLE_RATE), 60 * SAMPLE_RATE):
                file.write(np.zeros(min(60 * SAMPLE_RATE, int(place * SAMPLE_RATE) - begin)))
            if place in places:
                file.write(0.3 * np.sin(np.arange(2 * SAMPLE_RATE) / 20))
            at = int((place + 2) * SAMPLE_RATE)
    return out.getvalue()


def parts_of(pool: ProcessPool, file: bytes) -> list[list[Window | int | None]]:
    parts = [read_answer(pool.exchange(file, 300.0))]
    while parts[-1][-1] is not None:
        parts.append(read_answer(pool.exchange(b"", 300.0)))
    return parts


def test_a_long_recording_goes_on_where_it_stopped() -> None:
    pool = ProcessPool("bough.speech.decoder", LONG, 1)
    try:
        file = flac(0.4, [100.0, 1400.0])
        parts = parts_of(pool, file)
        assert len(parts) == 3 and [each for part in parts for each in part] == [*windows_of(file, 1500), None]
        read_answer(pool.exchange(file, 300.0))
        (process,) = pool._running
        os.kill(process._process.pid, signal.SIGKILL)  # its place has no file to go on with
        assert read_answer(pool.exchange(b"", 300.0)) == []
    finally:
        pool.close()


@pytest.mark.slow
def test_memory_does_not_depend_on_how_long_a_recording_is() -> None:
    pool = ProcessPool("bough.speech.decoder", LONG, 1)

    def peak() -> int:
        (process,) = pool._running
        status = Path(f"/proc/{process._process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) << 10

    try:
        pool.warm()
        places = [3.0, 4000.5, 7300.0, 10_000.25, 11_100.5]
        for hours in (0.1, 3.1):
            there = [place for place in places if place < hours * 3600]
            parts = parts_of(pool, flac(hours, there))
            found = [each for part in parts for each in part if isinstance(each, Window)]
            assert [each.start / SAMPLE_RATE for each in found] == pytest.approx(there, abs=0.25)
            assert max(each for part in parts for each in part if isinstance(each, int)) == hours * 3600 * SAMPLE_RATE
            assert peak() < 160 << 20, "two hours of samples are 440 MiB"
    finally:
        pool.close()
