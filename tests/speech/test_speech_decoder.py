"""Recordings are decoded in processes, whose end is nobody else's."""

from __future__ import annotations

import io
import os
import signal

import numpy as np
import pytest
import soundfile

from bough.core.errors import RequestError
from bough.core.pipe_process import ProcessPool
from bough.speech import decoder
from bough.speech.decoder import read_answer
from bough.speech.sound import SAMPLE_RATE, decode


def wav(seconds: float) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, np.sin(np.arange(int(seconds * SAMPLE_RATE)) / 20), SAMPLE_RATE, format="wav")
    return out.getvalue()


def test_a_process_gives_what_decoding_here_gives_and_another_takes_its_place_when_it_ends() -> None:
    pool = ProcessPool("bough.speech.decoder", b"", 1)
    try:
        pool.warm()
        assert np.array_equal(read_answer(pool.exchange(wav(2.0), 60.0)), decode(wav(2.0)))
        with pytest.raises(RequestError, match="cannot be read as sound") as caught:
            read_answer(pool.exchange(b"nothing that sounds", 60.0))
        assert caught.value.field == "file" and caught.value.status_code == 400
        for number, innocent in ((signal.SIGKILL, True), (signal.SIGSEGV, False)):
            (process,) = pool._running
            os.kill(process._process.pid, number)  # by somebody else, or by what it decodes
            if not innocent:
                with pytest.raises(RequestError, match="too much memory, to decode; cut it"):
                    read_answer(pool.exchange(wav(1.0), 60.0))
            assert len(read_answer(pool.exchange(wav(1.0), 60.0))) == SAMPLE_RATE
    finally:
        pool.close()


def test_a_place_whose_next_process_did_not_start_is_filled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProcessPool("bough.speech.decoder", b"", 1)
    try:
        pool.warm()
        (process,) = pool._running
        os.kill(process._process.pid, signal.SIGKILL)
        with monkeypatch.context() as patch:
            patch.setattr(pool, "_module", "bough.nothing_of_this_name")
            with pytest.raises(ChildProcessError, match="did not start"):
                pool.exchange(wav(1.0), 60.0)
        assert len(read_answer(pool.exchange(wav(1.0), 60.0))) == SAMPLE_RATE
    finally:
        pool.close()


def test_the_status_of_a_reason_comes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(file: bytes) -> np.ndarray:
        raise RequestError("PyAV is missing.", status_code=501)

    monkeypatch.setattr(decoder, "decode", missing)
    with pytest.raises(RequestError, match="PyAV is missing") as caught:
        read_answer(decoder.answer_to(b""))
    assert caught.value.status_code == 501
