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
from bough.core.pipe_process import ProcessPool
from bough.core.speech import SAMPLE_RATE, SpeechConfig
from bough.server.bodies import read_bytes, validation_error
from bough.server.context import ServerContext
from bough.server.endpoint import BINARY, EVENTS, OPENAI, Endpoint, json_response
from bough.server.errors import openai_shape
from bough.server.streaming import EventStream, json_event, while_connected
from bough.speech.decoder import TIMEOUT_S, read_answer
from bough.speech.sound import FloatArray
from bough.speech.transcriber import Segment, Task, Transcriber

MAX_PARTS = 64  # of a form
MAX_HEAD = 4096  # bytes of a part's headers that are read
DECODERS = 4  # recordings that are decoded at the same time
MOST_HELD = 4 * 3600 * SAMPLE_RATE  # samples of all recordings that are being heard: a gigabyte
LOOK_S, GRACE_S = 0.1, 10.0
NAME = re.compile(rb'^content-disposition:[^\r\n]*[; ]name="([^"\r\n]*)"', re.IGNORECASE | re.MULTILINE)
BOUNDARY = re.compile(r'boundary=("[^"]+"|[^\s;]+)', re.IGNORECASE)
# The form as the OpenAPI page has it: the file, and what else is said of it.
SAID = [(each.name, each.type, each.default) for each in msgspec.structs.fields(Task) if each.name != "translate"]
RecordingForm = msgspec.defstruct("RecordingForm", [("file", BINARY), ("model", str, ""), *SAID], kw_only=True)


class Recordings:
    """Decodes recordings, and bounds what they hold together: hours of silence make a small file. Those beyond wait
    until others have been heard."""

    def __init__(self, warm: bool) -> None:
        self._decoders, self._held = asyncio.Semaphore(DECODERS), 0
        self._pool = ProcessPool("bough.speech.decoder", b"", DECODERS)
        if warm:
            threading.Thread(target=self._pool.warm, daemon=True).start()

    async def read(self, file: bytes) -> FloatArray:
        async with self._decoders:
            sound = read_answer(await asyncio.to_thread(self._pool.exchange, file, TIMEOUT_S + GRACE_S))
            while self._held and self._held + len(sound) > MOST_HELD:
                await asyncio.sleep(LOOK_S)
        self._held += len(sound)
        weakref.finalize(sound, self._release, len(sound))
        return sound

    def _release(self, samples: int) -> None:
        self._held -= samples


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
    recordings = Recordings(warm=speech is not None)

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
            raise RequestError("file is missing: send the recording as a part of the form.", field="file")
        sound = await recordings.read(file)
        transcriber = Transcriber(context.client, context.read_inputs, context.require_tokenizer(), speech)
        task = msgspec.structs.replace(task, language=task.language or await transcriber.language(sound))
        if task.stream:
            return EventStream(_events(transcriber, sound, task), lambda each: json_event(openai_shape(each)))
        return await while_connected(request, _whole(transcriber, sound, task))

    return [
        Endpoint("/v1/audio/transcriptions", answer, "A recording to its text", **common),
        Endpoint("/v1/audio/translations", partial(answer, translate=True), "A recording to English text", **common),
    ]


async def _whole(transcriber: Transcriber, sound: FloatArray, task: Task) -> Response:
    segments = [each async for each in transcriber.pieces(sound, task) if isinstance(each, Segment)]
    text = "".join(each.text for each in segments).strip()
    plain = {"text": f"{text}\n", "srt": srt(segments), "vtt": vtt(segments)}
    if task.response_format in plain:
        return PlainTextResponse(plain[task.response_format])
    shown: dict[str, Any] = {"text": text, "usage": _usage(sound)}
    if task.response_format == "verbose_json":
        shown |= {"task": "translate" if task.translate else "transcribe", "language": task.language}
        shown["duration"] = len(sound) / SAMPLE_RATE
        if task.timestamp_granularities != ("word",):
            shown["segments"] = [msgspec.structs.replace(each, words=msgspec.UNSET) for each in segments]
        if "word" in task.timestamp_granularities:
            shown["words"] = [word for each in segments for word in each.words or ()]
    return json_response(shown)


async def _events(transcriber: Transcriber, sound: FloatArray, task: Task) -> AsyncGenerator[bytes, None]:
    whole = ""
    async with contextlib.aclosing(transcriber.pieces(sound, task)) as pieces:
        async for piece in pieces:
            if isinstance(piece, str):
                delta = piece if whole else piece.lstrip()
                whole += delta
                yield json_event({"type": "transcript.text.delta", "delta": delta})
    yield json_event({"type": "transcript.text.done", "text": whole, "usage": _usage(sound)})


def _usage(sound: FloatArray) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(len(sound) / SAMPLE_RATE)}


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
