"""Mixed load whose right answers are known: each request ends in exactly one outcome."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.multimodal.test_multimodal_families import as_png, picture

PATIENCE_S = 150.0
PAUSE_S = 0.05
RIGHT, DIFFERS, HONEST, BROKEN, LEFT, LOST = (
    "right",
    "differs",
    "honest error",
    "broken with its gateway",
    "left by its client",
    "lost",
)
OUTCOMES = (RIGHT, HONEST, BROKEN, LEFT, DIFFERS, LOST)


@dataclass(frozen=True)
class Case:
    """`how`: `whole`, `stream`, `abort` (over HTTP, in the middle), `disconnect` or `refused` (must be a 400)."""

    kind: str
    path: str
    body: dict[str, Any]
    how: str = "whole"


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
MODEL = "SmolLM2-135M-Instruct"
SEEING = "seeing"  # a model that reads images
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
LONG = "The river rises in the hills and turns past seven old towns. "


def chat(text: str) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **GREEDY}


def native(text: str, tokens: int = 40) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"model": MODEL, "text": text, "sampling_params": sampling}


def cases() -> list[Case]:
    found = []
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    for number in range(3):
        text = f"Question {number}: what is {number} plus seven?"
        person = {**chat(f"Invent person number {number}."), "response_format": schema, "max_tokens": 48}
        long = {"model": MODEL, "prompt": f"Chapter {number}. " + LONG * 40, **GREEDY}
        digits = {**native(f"My number is {number}"), "stream": True}
        digits["sampling_params"] = {"max_new_tokens": 16, "temperature": 0, "regex": r"[0-9]{3}-[0-9]{4}"}
        found += [
            Case("chat", "/v1/chat/completions", chat(text)),
            Case("stream", "/v1/chat/completions", {**chat(text + " Explain."), "stream": True}, "stream"),
            Case("stream", "/v1/completions", {"model": MODEL, "prompt": text, **GREEDY, "stream": True}, "stream"),
            Case("stream", "/generate", {**native(text), "stream": True}, "stream"),
            Case("stream", "/v1/messages", {**chat(text + " Briefly."), "stream": True}, "stream"),
            Case("grammar", "/v1/chat/completions", person),
            Case("grammar", "/generate", digits, "stream"),
            Case("long prompt", "/v1/completions", long),
            Case("long prompt", "/v1/completions", {**long, "stream": True}, "stream"),
            Case("abort", "/generate", {**native(text, 400), "stream": True}, "abort"),
            Case("disconnect", "/generate", {**native(text, 400), "stream": True}, "disconnect"),
        ]
    return [
        *found,
        Case("bad request", "/v1/chat/completions", {"model": MODEL, "messages": "no list"}, "refused"),
        Case("bad request", "/generate", {**native("hi"), "sampling_params": {"regex": "[0-9"}}, "refused"),
    ]


def image_cases() -> list[Case]:
    found = []
    for number in range(3):
        image = base64.b64encode(as_png(picture(60, 40, number))).decode()
        parts = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}},
            {"type": "text", "text": "What is on it?"},
        ]
        body = {"model": SEEING, "messages": [{"role": "user", "content": parts}], **GREEDY}
        found += [
            Case("image", "/v1/chat/completions", body),
            Case("image", "/v1/chat/completions", {**body, "stream": True}, "stream"),
        ]
    return found


class Honest(Exception):
    """An error that says what went wrong."""


class Lost(Exception):
    """Neither an answer nor an error."""


def text_of(answer: dict[str, Any]) -> str:
    """Of a whole answer in any protocol."""
    if "choices" in answer:
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
    else:
        text = answer["text"]
    assert isinstance(text, str)
    return text


@dataclass
class Stream:
    """What a client of any protocol has read of a stream."""

    text: str = ""
    done: bool = False
    aborted: bool = False

    def line(self, line: str) -> None:
        if line == "data: [DONE]":
            self.done = True
        if not line.startswith("data: {"):
            return
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            raise Honest(f"event: {message_in(event)}")
        if "text" in event:
            self.text = event["text"]
            reason = event["meta_info"]["finish_reason"] or {}
            self.aborted = reason.get("type") == "abort"
        elif event.get("type") == "content_block_delta":
            self.text += event["delta"]["text"]
        self.done = self.done or event.get("type") == "message_stop"
        for choice in event.get("choices", ()):
            self.text += choice.get("text") or choice.get("delta", {}).get("content") or ""


def message_in(answer: Any) -> str:
    """The sentence of an error; an error without one is not honest."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message") if isinstance(error, dict) else error
    if not isinstance(message, str) or not message.strip():
        raise Lost(f"an error without a sentence: {str(answer)[:200]}")
    return message


@dataclass
class Load:
    """Clients that each send one request after the other. `excused` says whether a gateway process that held a
    request begun then has been killed since."""

    url: str
    excused: Callable[[float], bool]
    clients: int = 8
    cases: list[Case] = field(default_factory=cases)
    expected: dict[int, str] = field(default_factory=dict)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    in_flight: int = 0

    def __post_init__(self) -> None:
        self._over = asyncio.Event()

    def stop(self) -> None:
        self._over.set()

    async def learn(self) -> None:
        """The right answers, of the undisturbed fleet."""
        async with self._session() as session:
            for index, case in enumerate(self.cases):
                if case.how in ("whole", "stream"):
                    self.expected[index] = await self._ask(session, case)
                elif case.how == "abort":
                    body = {**case.body, "stream": False}
                    self.expected[index] = await self._ask(session, Case(case.kind, case.path, body))

    async def run(self) -> None:
        async with self._session() as session:
            await asyncio.gather(*(self._client(session, number) for number in range(self.clients)))

    async def once(self) -> Counter[str]:
        """Every case one more time."""
        before = Counter(self.outcomes)
        async with self._session() as session:
            await asyncio.gather(*(self._request(session, index) for index in range(len(self.cases))))
        totals: Counter[str] = Counter()
        for (_, outcome), count in (self.outcomes - before).items():
            totals[outcome] += count
        return totals

    def _session(self) -> aiohttp.ClientSession:
        # Each request on a connection of its own, so that both gateway processes get some and none inherits another's
        # broken connection.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(number)
        while not self._over.is_set():
            outcome = await self._request(session, draw.randrange(len(self.cases)))
            await asyncio.sleep(1.0 if outcome in (HONEST, BROKEN) else PAUSE_S)

    async def _request(self, session: aiohttp.ClientSession, index: int) -> str:
        case, begin = self.cases[index], time.monotonic()
        self.sent += 1
        self.in_flight += 1
        note = ""
        try:
            async with asyncio.timeout(PATIENCE_S):
                outcome, note = await self._outcome(session, index, case)
        except Honest as error:
            outcome = HONEST
            self.errors[str(error)[:160]] += 1
        except (aiohttp.ClientError, OSError, Lost, TimeoutError, ValueError, KeyError) as error:
            # A connection that breaks tells the client; silence, or half a stream that looks whole, does not.
            told = isinstance(error, (aiohttp.ClientError, OSError)) and not isinstance(error, TimeoutError)
            outcome = BROKEN if told and self.excused(begin) else LOST
            note = f"{type(error).__name__}: {error}"
        finally:
            self.in_flight -= 1
        self.outcomes[case.kind, outcome] += 1
        if outcome in (DIFFERS, LOST):
            spent = time.monotonic() - begin
            self.notes.append(f"{outcome}: {case.kind} {case.path} ({case.how}) after {spent:.1f} s: {note[:300]}")
        return outcome

    async def _outcome(self, session: aiohttp.ClientSession, index: int, case: Case) -> tuple[str, str]:
        if case.how == "refused":
            async with session.post(self.url + case.path, json=case.body) as response:
                message = message_in(await response.json(content_type=None))
                if response.status == 400:
                    return RIGHT, ""
                if response.status < 400:
                    return DIFFERS, "a bad request was answered"
                raise Honest(f"{response.status} {message}")
        text = await self._ask(session, case)
        if case.how == "disconnect":
            return LEFT, ""
        wanted = self.expected[index]
        if text == wanted or (case.how == "abort" and wanted.startswith(text)):
            return RIGHT, ""
        return DIFFERS, f"{text!r} instead of {wanted!r}"

    async def _ask(self, session: aiohttp.ClientSession, case: Case) -> str:
        name = f"chaos-{self.sent}-{time.monotonic_ns()}"
        body = {**case.body, "rid": name} if case.how == "abort" else case.body
        async with session.post(self.url + case.path, json=body) as response:
            if response.status != 200:
                raise Honest(f"{response.status} {message_in(await response.json(content_type=None))}")
            if not case.body.get("stream"):
                return text_of(await response.json())
            stream, lines = Stream(), 0
            async for raw in response.content:
                stream.line(raw.decode().strip())
                lines += raw.startswith(b"data:")
                if case.how == "disconnect" and lines == 3:
                    response.close()
                    return stream.text
                if case.how == "abort" and lines == 3:
                    lines += 1
                    async with session.post(f"{self.url}/abort_request", json={"rid": name}) as answer:
                        await answer.read()
        if not stream.done:
            raise Lost(f"the stream ended without its last event, after {stream.text[-80:]!r}")
        return stream.text
