"""POST /v1/audio/transcriptions and /v1/audio/translations: a recording to text, subtitles or a stream of text."""

import asyncio
import contextlib
import math
import re
import threading
import weakref
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from bough.core.errors import RequestError
from bough.core.pipe_process import PATIENCE, ProcessPool
from bough.core.speech import SAMPLE_RATE, TIME_SAMPLES, SpeechConfig
from bough.server.bodies import read_bytes, validation_error
from bough.server.context import ServerContext
from bough.server.endpoint import BINARY, EVENTS, OPENAI, Endpoint, json_response
from bough.server.errors import openai_shape
from bough.server.streaming import EventStream, json_event, while_connected
from bough.speech.decoder import TIMEOUT_S, Part, read_answer
from bough.speech.sound import BLOCK, MINUTE, Window
from bough.speech.transcriber import Segment, Task, Transcriber

MAX_PARTS = 64  # of a form
MAX_HEAD = 4096  # bytes of a part's headers that are read
DECODERS = 4  # recordings that are decoded at the same time
MOST_LONG, MOST_STARTS = 8, 4  # long ones that are heard at the same time; how often one begins again
MOST_HELD = 120 * MINUTE * 4  # bytes of all windows that are being heard, before another part is decoded
LOOK_S = 0.1
NAME = re.compile(rb'^content-disposition:[^\r\n]*[; ]name="([^"\r\n]*)"', re.IGNORECASE | re.MULTILINE)
BOUNDARY = re.compile(r'boundary=("[^"]+"|[^\s;]+)', re.IGNORECASE)
# The form as the OpenAPI page has it: the file, and what else is said of it.
SAID = [(each.name, each.type, each.default) for each in msgspec.structs.fields(Task) if each.name != "translate"]
RecordingForm = msgspec.defstruct("RecordingForm", [("file", BINARY), ("model", str, ""), *SAID], kw_only=True)


class Recordings:
    """Decodes recordings: short ones at once, in a few processes, each longer one as it is heard, in a process of its
    own. Bounds how many there are, and what their windows hold together; further ones wait."""

    def __init__(self, speech: SpeechConfig | None) -> None:
        self._turns, self._long = asyncio.Semaphore(DECODERS), asyncio.Semaphore(MOST_LONG)
        self._blocks = speech.positions * TIME_SAMPLES // BLOCK if speech else 0
        self._pool, self._held = self._decoders(DECODERS, goes_on=False), 0
        if speech is not None:
            threading.Thread(target=self._pool.warm, daemon=True).start()

    async def read(self, file: bytes) -> AsyncGenerator[Window | int, None]:
        """What `windows_of` finds. Whoever has a window holds its room."""
        part, heard = await self._part(self._pool, file), 0
        if part[-1] is None:
            while (found := part.pop(0)) is not None:
                yield found
            return
        part.clear()  # running ones wait for the room of these windows
        async with self._long:
            pool = self._decoders(1, goes_on=True)
            try:
                for _ in range(MOST_STARTS):  # again where a process has taken the place of one that was killed
                    part = await self._part(pool, file)
                    while part:
                        if (found := part.pop(0)) is None:
                            return
                        if isinstance(found, int) or found.start >= heard:
                            heard = heard if isinstance(found, int) else found.start + 1
                            yield found
                        part = part or await self._part(pool, b"")
                raise RequestError("file could not be decoded: its process was killed; send it again.", status_code=503)
            finally:
                threading.Thread(target=pool.close, daemon=True).start()

    def _decoders(self, size: int, *, goes_on: bool) -> ProcessPool:
        return ProcessPool("bough.speech.decoder", msgspec.msgpack.encode((self._blocks, goes_on)), size)

    async def _part(self, pool: ProcessPool, message: bytes) -> Part:
        async with self._turns:
            while self._held > MOST_HELD:
                await asyncio.sleep(LOOK_S)
            asked = asyncio.ensure_future(asyncio.to_thread(pool.exchange, message, TIMEOUT_S, PATIENCE))
            try:
                part = read_answer(await asyncio.shield(asked))
            finally:
                await asyncio.wait([asked])  # its process is not free before, also if the client has left
        for each in part:
            if isinstance(each, Window):
                self._held += len(each.samples)
                weakref.finalize(each, self._release, len(each.samples))
        return part

    def _release(self, size: int) -> None:
        self._held -= size


def read_form(content_type: str, body: bytes) -> dict[str, list[bytes]]:
    """The parts of a multipart form, by name."""
    given = BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or given is None:
        raise RequestError("Send a form (multipart/form-data) with the recording as its part `file`.", field="file")
    parts = (b"\r\n" + body).split(b"\r\n--" + given[1].strip('"').encode(), MAX_PARTS)
    if not parts[-1].startswith(b"--"):
        raise RequestError(f"The form is cut short, or has more than {MAX_PARTS} parts.", field="file")
    fields: dict[str, list[bytes]] = {}
    for head, _, content in (part.partition(b"\r\n\r\n") for part in parts[1:-1]):
        if (name := NAME.search(head[:MAX_HEAD])) is not None:
            fields.setdefault(name[1].decode(errors="replace").removesuffix("[]"), []).append(content)
    return fields


def read_task(form: dict[str, list[bytes]], *, translate: bool) -> Task:
    texts = {name: [each.decode(errors="replace") for each in values] for name, values in form.items() if any(values)}
    times = texts.pop("timestamp_granularities", [])
    given = {name: values[-1] for name, values in texts.items()} | {"timestamp_granularities": times}
    try:
        task = msgspec.convert({**given, "translate": translate}, Task, strict=False)
    except msgspec.ValidationError as error:
        raise (validation_error(b"", str(error), Task) or error) from None
    if task.stream and task.response_format not in ("json", "text"):
        raise RequestError(f"stream gives text, which {task.response_format} is not.", field="response_format")
    if "word" in task.timestamp_granularities and task.response_format != "verbose_json":
        text = "timestamp_granularities: times of words come with response_format verbose_json, which is no stream."
        raise RequestError(text, field="timestamp_granularities")
    return task


def audio_routes(context: ServerContext) -> list[Endpoint]:
    common: dict[str, Any] = {**OPENAI, "answer": dict[str, Any], "other_types": (EVENTS, "text/plain")}
    common["own_bodies"] = (("multipart/form-data", RecordingForm),)
    given, name = context.model.limits.get("speech"), context.model.name
    speech = None if given is None else msgspec.convert(given, SpeechConfig)
    recordings = Recordings(speech)

    async def answer(request: Request, translate: bool = False) -> Response:
        if speech is None:
            raise RequestError(
                f"{name} does not transcribe audio; serve a Whisper model, such as whisper-tiny.en.", field="model"
            )
        if translate and speech.english_only:
            raise RequestError(f"{name} knows English only: it cannot translate; serve another Whisper.", field="model")
        form = read_form(request.headers.get("content-type", ""), await read_bytes(request))
        file = form.pop("file", [b""])[-1]
        task = read_task(form, translate=translate)
        if speech.english_only and task.language not in ("", "en"):
            raise RequestError(f"{name} knows English only; leave language out.", field="language")
        if not file:
            raise RequestError("file is missing or empty: send the recording as a part of the form.", field="file")
        transcriber = Transcriber(context.client, context.read_inputs, context.require_tokenizer(), speech)
        pieces = transcriber.pieces(recordings.read(file), task)
        if task.stream:
            return EventStream(_events(transcriber, pieces), lambda each: json_event(openai_shape(each)))
        return await while_connected(request, _whole(transcriber, pieces, task))

    return [
        Endpoint("/v1/audio/transcriptions", answer, "A recording to its text", **common),
        Endpoint("/v1/audio/translations", partial(answer, translate=True), "A recording to English text", **common),
    ]


async def _whole(transcriber: Transcriber, pieces: AsyncGenerator[str | Segment, None], task: Task) -> Response:
    segments = [each async for each in pieces if isinstance(each, Segment)]
    text = "".join(each.text for each in segments).strip()
    plain = {"text": f"{text}\n", "srt": srt(segments), "vtt": vtt(segments)}
    if task.response_format in plain:
        return PlainTextResponse(plain[task.response_format])
    shown: dict[str, Any] = {"text": text, "usage": _usage(transcriber)}
    if task.response_format == "verbose_json":
        shown |= {"task": "translate" if task.translate else "transcribe", "language": transcriber.language}
        shown["duration"] = transcriber.samples / SAMPLE_RATE
        if task.timestamp_granularities != ("word",):
            shown["segments"] = [msgspec.structs.replace(each, words=msgspec.UNSET) for each in segments]
        if "word" in task.timestamp_granularities:
            shown["words"] = [word for each in segments for word in each.words or ()]
    return json_response(shown)


async def _events(transcriber: Transcriber, pieces: AsyncGenerator[str | Segment, None]) -> AsyncGenerator[bytes, None]:
    whole = ""
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            if isinstance(piece, str):
                delta = piece if whole else piece.lstrip()
                whole += delta
                yield json_event({"type": "transcript.text.delta", "delta": delta})
    yield json_event({"type": "transcript.text.done", "text": whole, "usage": _usage(transcriber)})


def _usage(transcriber: Transcriber) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(transcriber.samples / SAMPLE_RATE)}


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
