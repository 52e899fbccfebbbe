"""POST /v1/audio/transcriptions and /v1/audio/translations: a recording to text, subtitles or a stream of text."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from bough.core.errors import RequestError
from bough.core.speech import SAMPLE_RATE, SpeechConfig
from bough.server.bodies import read_bytes
from bough.server.context import ServerContext
from bough.server.endpoint import EVENTS, OPENAI, Endpoint, json_response
from bough.server.errors import openai_shape
from bough.server.streaming import EventStream, json_event, while_connected
from bough.speech.sound import FloatArray, decode
from bough.speech.text import Segment, srt, verbose, vtt
from bough.speech.transcriber import Task, Transcriber

FORMATS = ("json", "text", "srt", "verbose_json", "vtt")
MAX_PARTS = 64  # of a form
NAME = re.compile(rb'^content-disposition:[^\r\n]*[; ]name="([^"\r\n]*)"', re.IGNORECASE | re.MULTILINE)
BOUNDARY = re.compile(r'boundary=("[^"]+"|[^\s;]+)', re.IGNORECASE)

Form = dict[str, list[bytes]]


def read_form(content_type: str, body: bytes) -> Form:
    """The parts of a multipart form, by name."""
    given = BOUNDARY.search(content_type)
    if not content_type.lower().startswith("multipart/form-data") or given is None:
        raise RequestError("Send a form (multipart/form-data) with the recording as its part `file`.", field="file")
    parts = (b"\r\n" + body).split(b"\r\n--" + given[1].strip('"').encode(), MAX_PARTS)
    fields: Form = {}
    for part in parts[1:]:
        head, _, content = part.partition(b"\r\n\r\n")
        if (name := NAME.search(head)) is not None:
            fields.setdefault(name[1].decode(errors="replace").removesuffix("[]"), []).append(content)
    if not parts[-1].startswith(b"--"):
        raise RequestError(f"The form is cut short, or has more than {MAX_PARTS} parts.", field="file")
    return fields


class Asked(msgspec.Struct, frozen=True):
    """The fields of a form."""

    file: bytes
    task: Task
    format: str


def read_asked(form: Form, *, translate: bool) -> Asked:
    def text(name: str, default: str = "") -> str:
        return form.get(name, [default.encode()])[-1].decode(errors="replace").strip()

    if not form.get("file") or not form["file"][-1]:
        raise RequestError("file is missing: send the recording as a part of the form.", field="file")
    shape, stream = text("response_format", "json"), text("stream", "false").lower()
    if shape not in FORMATS:
        raise RequestError(
            f"response_format must be one of {', '.join(FORMATS)}; got {shape!r}.", field="response_format"
        )
    if stream not in ("true", "false", "1", "0"):
        raise RequestError(f"stream must be true or false, got {stream!r}.", field="stream")
    for name in form.get("timestamp_granularities", []):
        if name != b"segment":
            raise RequestError(
                "timestamp_granularities may hold segment only; this server gives no times of words.",
                field="timestamp_granularities",
            )
    try:
        temperature = float(text("temperature", "0") or 0)
    except ValueError:
        temperature = math.nan
    if not 0 <= temperature <= 1:
        raise RequestError("temperature must be a number from 0 to 1.", field="temperature")
    task = Task(
        language=text("language").lower() or None,
        prompt=text("prompt"),
        temperature=temperature,
        timed=stream in ("false", "0"),
        stream=stream in ("true", "1"),
        translate=translate,
    )
    if task.stream and shape not in ("json", "text"):
        raise RequestError(f"stream gives text; response_format {shape!r} does not go with it.", field="stream")
    return Asked(form["file"][-1], task, shape)


def audio_routes(context: ServerContext) -> list[Endpoint]:
    routes = AudioRoutes(context)
    answers: dict[str, Any] = {**OPENAI, "answer": dict[str, Any], "other_types": (EVENTS,)}
    return [
        Endpoint("/v1/audio/transcriptions", routes.transcribe, "A recording to its text", **answers),
        Endpoint("/v1/audio/translations", routes.translate, "A recording to English text", **answers),
    ]


class AudioRoutes:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        given = context.model.limits.get("speech")
        self._speech = None if given is None else msgspec.convert(given, SpeechConfig)

    async def transcribe(self, request: Request) -> Response:
        return await self._answer(request, translate=False)

    async def translate(self, request: Request) -> Response:
        return await self._answer(request, translate=True)

    async def _answer(self, request: Request, *, translate: bool) -> Response:
        if self._speech is None:
            text = f"{self._context.model.name} does not hear; serve a Whisper model, such as whisper-tiny.en."
            raise RequestError(text, field="model")
        if translate and self._speech.english_only:
            text = (
                f"{self._context.model.name} knows English only, so it cannot translate; serve a multilingual Whisper."
            )
            raise RequestError(text, field="model")
        form = read_form(request.headers.get("content-type", ""), await read_bytes(request))
        asked = read_asked(form, translate=translate)
        if self._speech.english_only and asked.task.language not in (None, "en", "english"):
            raise RequestError(f"{self._context.model.name} knows English only; leave language out.", field="language")
        sound = await asyncio.to_thread(decode, asked.file)
        context = self._context
        transcriber = Transcriber(context.client, context.read_inputs, context.require_tokenizer(), self._speech)
        if asked.task.stream:
            return EventStream(_events(transcriber, sound, asked.task), lambda each: json_event(openai_shape(each)))
        return await while_connected(request, _whole(transcriber, sound, asked))


async def _told(transcriber: Transcriber, sound: FloatArray, task: Task) -> Task:
    language = task.language or await transcriber.language(sound)
    return msgspec.structs.replace(task, language=language)


async def _whole(transcriber: Transcriber, sound: FloatArray, asked: Asked) -> Response:
    task = await _told(transcriber, sound, asked.task)
    segments = [each async for each in transcriber.pieces(sound, task) if isinstance(each, Segment)]
    text = "".join(each.text for each in segments).strip()
    match asked.format:
        case "text":
            return PlainTextResponse(text + "\n")
        case "srt":
            return PlainTextResponse(srt(segments))
        case "vtt":
            return PlainTextResponse(vtt(segments), media_type="text/vtt")
    answer: dict[str, Any] = {"text": text, "usage": _usage(sound)}
    if asked.format == "verbose_json":
        facts = {"task": "translate" if task.translate else "transcribe", "language": task.language}
        answer |= {**facts, "duration": len(sound) / SAMPLE_RATE, "segments": verbose(segments)}
    return json_response(answer)


async def _events(transcriber: Transcriber, sound: FloatArray, task: Task) -> AsyncGenerator[bytes, None]:
    whole = ""
    async with contextlib.aclosing(transcriber.pieces(sound, await _told(transcriber, sound, task))) as pieces:
        async for piece in pieces:
            if isinstance(piece, str):
                delta = piece if whole else piece.lstrip()
                whole += delta
                yield json_event({"type": "transcript.text.delta", "delta": delta})
    yield json_event({"type": "transcript.text.done", "text": whole, "usage": _usage(sound)})


def _usage(sound: FloatArray) -> dict[str, Any]:
    return {"type": "duration", "seconds": math.ceil(len(sound) / SAMPLE_RATE)}
