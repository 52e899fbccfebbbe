"""Recordings over HTTP, by OpenAI's own client over a scripted engine: formats, windows, streams, retries, refusals."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
import soundfile

from bough.core.errors import RequestError
from bough.core.finish import FinishAbort, FinishReason, FinishStop
from bough.core.pipe_process import PATIENCE
from bough.core.speech import SpeechConfig
from bough.messages.outputs import Delta, LogprobRun, Started
from bough.messages.requests import Generate
from bough.server.context import ServerContext
from bough.server.openai import audio
from bough.server.openai.audio import read_form
from bough.speech import decoder, sound, transcriber
from bough.speech.sound import Window
from tests.server.native_engine import NativeEngine, open_server

SPEECH = SpeechConfig({"num_mel_bins": 80, "max_source_positions": 1500}, start=257, end=256, timestamps=400)
RATE = 16_000


class Pool:
    """Decodes without a process for each test; tests/speech/test_speech_decoder.py has those."""

    closed = 0

    def __init__(self, module: str, hello: bytes, size: int) -> None:
        assert module == decoder.__name__
        self._answer = decoder.answering(*msgspec.msgpack.decode(hello))

    def warm(self) -> None: ...

    def exchange(self, message: bytes, timeout_s: float, patience: int) -> bytes:
        assert (timeout_s, patience) == (decoder.TIMEOUT_S, PATIENCE)
        return self._answer(message)

    def close(self) -> None:
        Pool.closed += 1


@pytest.fixture(autouse=True)
def decoding_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "ProcessPool", Pool)


def at(seconds: float) -> int:
    return 400 + round(seconds * 50)


class HearingEngine(NativeEngine):
    """Answers each window by the script; `unlikely` temperatures get tokens that the model itself finds unlikely."""

    def __init__(self, script: Callable[[Generate], Sequence[int]], *, unlikely: float = -1.0, silent: float = 0.01):
        super().__init__(script)
        self._unlikely, self._silent, self.heard = unlikely, silent, list[np.ndarray]()
        self.end: FinishReason = FinishStop(256)

    def context(self, **settings: Any) -> ServerContext:
        made = super().context(**settings)
        model = dataclasses.replace(made.model, vocab_size=1901)
        model.limits["speech"] = msgspec.to_builtins(SPEECH)
        return dataclasses.replace(made, model=model)

    def _answer(self, message: Generate) -> None:
        assert message.media is not None
        (item,) = message.media.items
        (feature,) = item.features
        self.heard.append(np.fromfile(item.file, feature.dtype).reshape(feature.shape))
        assert message.namespace.startswith(item.digest.hex())
        if message.pooling is not None:
            self._look(message, np.frombuffer(message.input_ids, np.int32))
            return
        assert message.logprobs is not None
        ids, prompt = list(self.script(message)), np.frombuffer(message.input_ids, np.int32)  # type: ignore[arg-type]
        score = -3.0 if message.sampling.temperature <= self._unlikely else -0.1
        after_start = len(prompt) - message.logprobs.start - 1

        def run(tokens: Sequence[int], silent: float) -> LogprobRun:
            def floats(value: float) -> bytes:
                return np.full(len(tokens), value, np.float32).tobytes()

            return LogprobRun(np.array(tokens, np.int32).tobytes(), floats(score), 0, b"", b"", floats(np.log(silent)))

        given = run(prompt[message.logprobs.start + 1 :].tolist(), self._silent) if after_start else None
        started = Started(message.handle, len(prompt), 0, 0.0, given)
        decoder, deltas = self.tokenizer.decoder((), True), list[Delta]()
        for number, token in enumerate(ids):
            last = number == len(ids) - 1
            text = decoder.push([token] if token < 256 else []) + (decoder.flush() if last else "")
            raw = np.array([token], np.int32).tobytes()
            end = self.end if last else None
            deltas.append(
                Delta(message.handle, text, raw, None if number else started, [run([token], self._silent)], end)
            )
        self._later(deltas or [Delta(message.handle, "", b"", finish=self.end)])

    def _look(self, message: Generate, prompt: np.ndarray) -> None:
        """Each token is read while five more positions, a tenth of a second, are looked at."""
        assert message.pooling is not None and message.pooling.dimensions is not None
        tokens = len(prompt) - (message.pooling.second or 0)
        seen = np.repeat(np.eye(tokens, dtype=np.float32), 5, axis=1)
        seen = np.pad(seen, ((0, 0), (0, 5 * tokens + message.pooling.dimensions)), mode="edge")
        vector = seen[:, : message.pooling.dimensions].tobytes()
        started = Started(message.handle, len(prompt), 0, 0.0, None)
        self._later([Delta(message.handle, "", b"", started, [], FinishStop(None), vector=vector)])


def wav(seconds: float, kind: str = "wav") -> bytes:
    count = int(seconds * RATE)
    loud = 0.2 * (0.55 + 0.45 * np.sin(2 * np.pi * 4 * np.arange(count) / RATE))
    out = io.BytesIO()
    soundfile.write(out, loud * np.random.default_rng(0).normal(size=count), RATE, format=kind)
    return out.getvalue()


def hello(message: Generate) -> list[int]:
    return [at(0), *b" Hello", at(1), at(1.5), *b" there.", at(2), 256]


def served(engine: NativeEngine, test: Callable[[openai.AsyncOpenAI], Awaitable[Any]], **settings: Any) -> Any:
    async def main() -> Any:
        async with open_server(engine, **settings) as http:
            url = f"{http.base_url}/v1"
            return await test(openai.AsyncOpenAI(base_url=url, api_key="none", http_client=http, max_retries=0))

    return asyncio.run(main())


def transcribed(engine: NativeEngine, seconds: float = 2.0, **asked: Any) -> Any:
    async def test(client: openai.AsyncOpenAI) -> Any:
        return await client.audio.transcriptions.create(file=("a.wav", wav(seconds)), model="tiny", **asked)

    return served(engine, test)


def test_every_format_of_an_answer() -> None:
    assert transcribed(HearingEngine(hello)).text == "Hello there."
    assert transcribed(HearingEngine(hello), response_format="text") == "Hello there.\n"
    assert "00:00:01,500 --> 00:00:02,000\nthere." in transcribed(HearingEngine(hello), response_format="srt")
    assert transcribed(HearingEngine(hello), response_format="vtt").startswith(
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.000"
    )
    asked = {"response_format": "verbose_json", "timestamp_granularities": ["segment"]}
    verbose = transcribed(HearingEngine(hello), **asked)
    assert (verbose.language, verbose.duration) == ("en", 2.0)
    assert [(each.id, each.start, each.end, each.text) for each in verbose.segments] == [
        (0, 0.0, 1.0, " Hello"),
        (1, 1.5, 2.0, " there."),
    ]
    assert verbose.segments[0].no_speech_prob == pytest.approx(0.01) and verbose.segments[0].avg_logprob < 0


def test_words_have_times() -> None:
    engine = HearingEngine(hello)
    asked = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    verbose = transcribed(engine, 2.0, **asked)
    # Tokens are bytes and times: `Hello` is read in the places 1 to 6, ` there.` in 9 to 15; paths bend by a position.
    assert [(each.word, each.start, each.end) for each in verbose.words] == [
        ("Hello", 0.0, pytest.approx(0.6, abs=0.021)),
        ("there.", pytest.approx(0.8, abs=0.021), pytest.approx(1.5, abs=0.021)),
    ]
    assert verbose.segments is None and verbose.text == "Hello there."
    read = np.frombuffer(engine.requests[1].input_ids, np.int32).tolist()
    assert read == [257, *hello(engine.requests[0])[:-1]], "the decoder reads its answer, without the end"
    both = transcribed(HearingEngine(hello), 2.0, **{**asked, "timestamp_granularities": ["word", "segment"]})
    assert len(both.words) == len(both.segments) == 2 and both.segments[1].text == " there."


def streamed(engine: NativeEngine) -> list[Any]:
    async def test(client: openai.AsyncOpenAI) -> list[Any]:
        stream = await client.audio.transcriptions.create(file=("a.wav", wav(2)), model="tiny", stream=True)
        return [event async for event in stream]

    events: list[Any] = served(engine, test)
    return events


def test_a_stream_is_the_text_in_pieces() -> None:
    engine = HearingEngine(lambda message: [*b" Hello there.", 256])
    *deltas, done = streamed(engine)
    assert len(deltas) > 3 and {each.type for each in deltas} == {"transcript.text.delta"}
    assert "".join(each.delta for each in deltas) == done.text == "Hello there."
    assert np.frombuffer(engine.requests[0].input_ids, np.int32).tolist() == [257, 399], "no times are asked for"


def test_long_recordings_are_heard_in_windows_and_times_go_on() -> None:
    numbers = iter("abcdefgh")

    def script(message: Generate) -> list[int]:
        return [at(0), *f" {next(numbers)}".encode(), at(30), 256]

    engine = HearingEngine(script)
    verbose = transcribed(engine, 70.0, response_format="verbose_json")
    assert sorted(verbose.text.split()) == ["a", "b", "c"] and len(engine.heard) == 3
    starts = [each.start for each in verbose.segments]
    assert starts[0] == 0.0 and all(18 < later - sooner <= 30 for sooner, later in itertools.pairwise(starts))
    assert all(each.shape == (80, 3000) for each in engine.heard)
    assert verbose.segments[-1].end <= 70.0


def test_what_an_answer_leaves_out_is_heard_again() -> None:
    engine = HearingEngine(lambda message: [at(0), *b" x", at(2), 256])
    assert transcribed(engine, 6.0).text == "x x x", "each answer ends two seconds into its window"


def test_a_doubtful_answer_is_tried_again_warmer() -> None:
    engine = HearingEngine(hello, unlikely=0.3)
    transcribed(engine)
    assert [request.sampling.temperature for request in engine.requests] == [0.0, 0.2, 0.4]
    engine = HearingEngine(hello, unlikely=0.3)
    transcribed(engine, temperature=0.1)
    assert [request.sampling.temperature for request in engine.requests] == [0.1]


def test_a_window_without_speech_has_no_text() -> None:
    assert transcribed(HearingEngine(hello, unlikely=1.0, silent=0.9)).text == ""


@pytest.mark.parametrize(("unlikely", "text"), [(1.0, ""), (-1.0, "You.")])
def test_a_stream_waits_for_the_end_where_there_may_be_no_speech(unlikely: float, text: str) -> None:
    engine = HearingEngine(lambda message: [*b" You.", 256], unlikely=unlikely, silent=0.9)
    *deltas, done = streamed(engine)
    assert done.text == text and [each.delta for each in deltas] == [text] * bool(text)


@pytest.mark.parametrize("written", [b"", b" Hello th"])
@pytest.mark.parametrize("status", [499, 503])
def test_a_window_that_is_aborted_ends_the_whole_with_an_error(written: bytes, status: int) -> None:
    """By /abort_request, a pause, --running-timeout-s or the end of a drain: half a text would pass for all of it."""
    engine = HearingEngine(lambda message: [*written])
    engine.end = FinishAbort("It was ended.", status, "AbortError")
    with pytest.raises(openai.APIStatusError, match="It was ended") as caught:
        transcribed(engine)
    assert caught.value.status_code == status
    with pytest.raises(openai.APIError, match="It was ended"):  # in front of the stream, or as its last event
        streamed(engine)


def test_a_full_queue_refuses_a_recording_at_its_beginning_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight windows at a time do not fit into a short queue; what has been heard must not be lost to others' bursts."""
    monkeypatch.setattr(transcriber, "FULL_S", 0.0)
    full = FinishAbort("The request queue is full.", 429, "QueueFullError")

    class Full(HearingEngine):
        asked = 0

        def _answer(self, message: Generate) -> None:
            self.asked += 1
            if self.asked % 2:
                super()._answer(message)
            else:
                self._later([Delta(message.handle, "", b"", finish=full)])

    engine = Full(lambda message: [at(0), *b" x", at(30), 256])
    assert transcribed(engine, 130.0).text.split() == ["x"] * len(engine.heard)
    assert engine.asked > len(engine.heard) > 4, "every second one was refused"
    engine.asked = 1
    with pytest.raises(openai.RateLimitError, match="queue is full"):
        transcribed(engine, 130.0)


def test_a_prompt_comes_before_the_start() -> None:
    engine = HearingEngine(hello)
    transcribed(engine, prompt="Hi")
    tokens = np.frombuffer(engine.requests[0].input_ids, np.int32).tolist()
    assert tokens == [397, *b" Hi", 257]


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"file": ("a.wav", b"no sound at all")}, "cannot be read as sound"),
        ({"file": ("a.wav", b"")}, "file is missing or empty"),
        ({"response_format": "xml"}, "response_format must be one of 'json', 'text', 'srt', 'verbose_json', 'vtt'"),
        ({"temperature": 3.0}, "temperature: expected float <= 1.0"),
        ({"language": "de"}, "knows English only"),
        ({"timestamp_granularities": ["word"]}, "times of words come with response_format verbose_json"),
        ({"timestamp_granularities": ["letter"]}, "timestamp_granularities"),
        ({"stream": True, "response_format": "srt"}, "stream gives text"),
    ],
)
def test_what_is_wrong_is_said(asked: dict[str, Any], complaint: str) -> None:
    async def test(client: openai.AsyncOpenAI) -> None:
        given: dict[str, Any] = {"file": ("a.wav", wav(1)), "model": "tiny", **asked}
        with pytest.raises(openai.BadRequestError, match=complaint):
            await client.audio.transcriptions.create(**given)

    served(HearingEngine(hello), test)


def test_models_are_asked_for_what_they_can() -> None:
    async def hears(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="English only: it cannot translate"):
            await client.audio.translations.create(file=("a.wav", wav(1)), model="tiny")
        with pytest.raises(openai.BadRequestError, match="/v1/audio/transcriptions"):
            await client.chat.completions.create(messages=[{"role": "user", "content": "a"}], model="tiny")

    async def reads(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="does not transcribe"):
            await client.audio.transcriptions.create(file=("a.wav", wav(1)), model="tiny")

    served(HearingEngine(hello), hears)
    served(NativeEngine(lambda message: [1]), reads)


def test_what_is_no_form_is_refused() -> None:
    async def main() -> None:
        async with open_server(HearingEngine(hello)) as http:
            for headers, body in [
                ({"content-type": "application/json"}, b"{}"),
                ({"content-type": "multipart/form-data; boundary=x"}, b"--x\r\ncut short"),
                ({"content-type": "multipart/form-data; boundary=x"}, b"--x--\r\n"),
            ]:
                answer: httpx.Response = await http.post("/v1/audio/transcriptions", content=body, headers=headers)
                assert answer.status_code == 400 and json.loads(answer.content)["error"]["param"] == "file"

    asyncio.run(main())


def test_forms_are_read_as_they_are_written() -> None:
    fields = {"a": b"1\r\n--no", "b[]": b"\r\n", "file": bytes(range(256)) * 40}
    request = httpx.Request("POST", "http://x", files={name: ("n", value) for name, value in fields.items()})
    form = read_form(request.headers["content-type"], request.read())
    assert form == {"a": [fields["a"]], "b": [fields["b[]"]], "file": [fields["file"]]}
    for padding, found in ((100, {"a": [b"1"]}), (5000, {})):  # headers of 64 MiB would be searched for ten seconds
        head = b"X: " + b"a" * padding + b'\r\nContent-Disposition: form-data; name="a"'
        assert read_form("multipart/form-data; boundary=x", b"--x\r\n" + head + b"\r\n\r\n1\r\n--x--") == found


async def found_in(recording: AsyncIterator[Window | int]) -> tuple[list[Window], list[int]]:
    found = [each async for each in recording]
    return [each for each in found if isinstance(each, Window)], [each for each in found if isinstance(each, int)]


def test_recordings_wait_until_others_have_been_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr(audio, "MOST_HELD", 3 * 4 * RATE)
        recordings = audio.Recordings(SPEECH)
        first, lengths = await found_in(recordings.read(wav(4.0)))  # longer than all may be together
        assert len(first) == 1 and lengths == [4 * RATE]
        second = asyncio.create_task(found_in(recordings.read(wav(2.0))))
        await asyncio.sleep(5 * audio.LOOK_S)
        assert not second.done()
        del first
        assert (await second)[1] == [2 * RATE]

    asyncio.run(asyncio.wait_for(main(), 30))


def apart(*places: float, length: float) -> bytes:
    """A recording with two seconds of voice at each of these seconds."""
    out, voice, at = io.BytesIO(), soundfile.read(io.BytesIO(wav(2.0)), dtype="float32")[0], 0
    with soundfile.SoundFile(out, "w", RATE, 1, format="flac") as file:
        for place in (*places, length):
            for begin in range(at, int(place * RATE), 60 * RATE):
                file.write(np.zeros(min(60 * RATE, int(place * RATE) - begin), np.float32))
            if place != length:
                file.write(voice)
            at = int(place * RATE) + len(voice)
    return out.getvalue()


@pytest.mark.parametrize("stream", [False, True])
def test_long_recordings_are_heard_as_they_are_decoded(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """What is long, and how much is decoded at a time, is cut to a tenth."""
    monkeypatch.setattr(sound, "SHORT", sound.MINUTE)
    monkeypatch.setattr(decoder, "SHORT", sound.MINUTE)
    monkeypatch.setattr(sound, "STRETCH", 12 * sound.MINUTE // sound.BLOCK)
    closed, places = Pool.closed, [30.0, 800.5, 1500.0]
    file = apart(*places, length=1600.25)

    async def test(client: openai.AsyncOpenAI) -> Any:
        asked: dict[str, Any] = {"stream": True} if stream else {"response_format": "verbose_json"}
        answer = await client.audio.transcriptions.create(file=("a.flac", file), model="tiny", **asked)
        return [event async for event in answer] if stream else answer

    engine = HearingEngine((lambda message: [*b" Hello there.", 256]) if stream else hello)
    answer = served(engine, test)
    assert len(engine.heard) == 3 and Pool.closed == closed + 1
    if stream:
        assert answer[-1].text == "Hello there. Hello there. Hello there." and answer[-1].usage.seconds == 1601
        return
    assert answer.duration == 1600.25 and answer.text == "Hello there. Hello there. Hello there."
    starts = [each.start for each in answer.segments[::2]]
    assert starts == pytest.approx(places, abs=0.25) and [each.id for each in answer.segments] == list(range(6))


def test_a_short_recording_does_not_wait_for_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sound, "SHORT", sound.MINUTE)
    monkeypatch.setattr(decoder, "SHORT", sound.MINUTE)
    monkeypatch.setattr(audio, "MOST_LONG", 1)

    async def main() -> None:
        recordings, file = audio.Recordings(SPEECH), apart(*range(5, 600, 60), length=600)
        first = recordings.read(file)
        while isinstance(await anext(first), int):
            pass  # its first window: it goes on when somebody asks for more
        second = asyncio.create_task(found_in(recordings.read(file)))
        assert len((await found_in(recordings.read(wav(2.0))))[0]) == 1
        assert not second.done(), "one long recording at a time"
        await first.aclose()  # whose client has left
        assert len((await second)[0]) == 10

    asyncio.run(asyncio.wait_for(main(), 60))


def test_recordings_that_wait_hold_nothing_that_others_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first windows were kept meanwhile: with enough of them nothing was decoded any more."""
    monkeypatch.setattr(sound, "SHORT", 3 * sound.MINUTE)
    monkeypatch.setattr(decoder, "SHORT", 3 * sound.MINUTE)
    monkeypatch.setattr(audio, "MOST_LONG", 1)
    monkeypatch.setattr(audio, "MOST_HELD", 10 * 4 * RATE)

    async def main() -> None:
        recordings, file = audio.Recordings(SPEECH), apart(*range(5, 200, 20), length=200)

        async def heard() -> int:
            return sum([isinstance(each, Window) async for each in recordings.read(file)])

        assert await asyncio.gather(*(heard() for _ in range(4))) == [10] * 4
        assert recordings._held == 0

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("kills", [1, 9])
def test_a_long_recording_outlives_its_process(monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
    monkeypatch.setattr(sound, "SHORT", sound.MINUTE)
    monkeypatch.setattr(decoder, "SHORT", sound.MINUTE)
    left = [kills]

    class Dying(Pool):
        def exchange(self, message: bytes, timeout_s: float, patience: int) -> bytes:
            if not message and left[0]:
                left[0] -= 1
                self._answer = decoder.answering(1500, goes_on=True)  # of another process
            return super().exchange(message, timeout_s, patience)

    monkeypatch.setattr(audio, "ProcessPool", Dying)

    async def main() -> None:
        file = apart(*range(5, 300, 60), length=300)
        reading = found_in(audio.Recordings(SPEECH).read(file))
        if kills == 9:
            with pytest.raises(RequestError, match="its process was killed; send it again") as caught:
                await reading
            assert caught.value.status_code == 503
            return
        windows, lengths = await reading
        assert [round(each.start / RATE) for each in windows] == [*range(5, 300, 60)] and lengths[-1] == 300 * RATE

    asyncio.run(asyncio.wait_for(main(), 120))
