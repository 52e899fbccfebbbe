"""A load's conversations and records, the request bodies of each kind of server, and how its streams are read.

Readers use the server's own token counts where it gives them. HTTP is spoken by the gateway's client for one server.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from bough.core.errors import BoughError, SettingsError
from bough.gateway import http_client
from bough.gateway.upstream_response import UpstreamResponse

TIMEOUT_S = 600.0
CONTENT_TYPE = (b"Content-Type", b"application/json")
OnData = Callable[[bytes], None]


class HttpFailure(Exception):
    """No 200, a broken connection, or a timeout."""


class ServerError(BoughError):
    """The server under load cannot be used."""


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """The first request to a server."""
    try:
        yield
    except HttpFailure as error:
        raise ServerError(f"Cannot reach {url}: {error}.") from None


@dataclass(slots=True)
class HttpResponse:
    """`body` stays empty when it was streamed to a reader."""

    status: int = 0
    body: bytearray = field(default_factory=bytearray)

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class HttpClient:
    """Opens as many connections as there are requests at once."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> None:
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise SettingsError(f"{url!r} is not the address of a server; give one such as http://127.0.0.1:30000.")
        self._origin = http_client.Origin.of(url)
        sent = {"Accept": "*/*", **(headers or {})}
        self._headers = [(name.encode(), value.encode()) for name, value in sent.items()]
        self._timeout_s = timeout_s
        # A server under load may take long to accept, so connecting has no limit of its own.
        self._client = http_client.HttpClient(connect_timeout_s=timeout_s)

    async def post(self, path: str, body: Any, on_data: OnData | None = None) -> HttpResponse:
        """Sends JSON, or bytes that are JSON. With `on_data` the body of a 200 goes there as it arrives."""
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return await self._request("POST", path, raw, on_data)

    async def get(self, path: str) -> HttpResponse:
        return await self._request("GET", path, b"", None)

    def close(self) -> None:
        self._client.close()

    async def _request(self, method: str, path: str, body: bytes, on_data: OnData | None) -> HttpResponse:
        try:
            async with asyncio.timeout(self._timeout_s):
                with contextlib.closing(await self._send(method, path, body)) as response:
                    answer = HttpResponse(response.status)
                    take = on_data if on_data is not None and response.status == 200 else answer.body.extend
                    while piece := await response.read_some():
                        take(piece)
                    return answer
        except TimeoutError:
            raise HttpFailure(f"no answer within {self._timeout_s:g} s") from None
        except OSError as error:
            raise HttpFailure(str(error) or type(error).__name__) from None

    async def _send(self, method: str, path: str, body: bytes) -> UpstreamResponse:
        headers = [*self._headers, CONTENT_TYPE] if body else self._headers
        while True:
            try:
                return await self._client.request(self._origin, method, path.encode(), headers, body)
            except http_client.StaleConnectionError:
                continue  # the server closed a kept connection; each is tried once


Message = dict[str, Any]  # role, content
Prompt = str | list[int] | list[Message]


@dataclass(frozen=True, slots=True)
class Turn:
    """The user's part of a turn, and how many tokens to answer."""

    prompt: Prompt
    output_tokens: int
    input_tokens: int  # as far as the data set knows; the server's own count is preferred


Conversation = tuple[Turn, ...]  # each prompt continues everything before it


@dataclass(frozen=True, slots=True)
class Arrival:
    """A conversation and when it starts, in seconds from the start of the load."""

    at_s: float
    conversation: Conversation


@dataclass(slots=True)
class Record:
    """One request. Times are seconds from the start of the load, or durations."""

    began_s: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    first_s: float = 0.0  # to the first token
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # before each further token
    text: str = ""
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None


# ---- how each kind of server is asked


Api = Literal["native", "completions", "chat"]
# The names that users know their servers by.
_OPENAI_SERVERS = ("bough-oai", "openai", "sglang-oai", "vllm", "llama.cpp")
BACKENDS: dict[str, Api] = {
    **dict.fromkeys(("bough", "native", "sglang"), "native"),
    **dict.fromkeys(_OPENAI_SERVERS, "completions"),
    **{f"{name}-chat": "chat" for name in _OPENAI_SERVERS},
}
PATHS: dict[Api, str] = {"native": "/generate", "completions": "/v1/completions", "chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """What all requests of a run share."""

    api: Api
    model: str
    ignore_eos: bool = True
    stream: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, history: Prompt, output_tokens: int) -> dict[str, Any]:
        ends = {"ignore_eos": True} if self.ignore_eos else {}
        if self.api == "native":
            name = "text" if isinstance(history, str) else "input_ids"
            sampling = {"temperature": 0.0, "max_new_tokens": output_tokens, **ends}
            given = dict(self.extra)
            sampling |= given.pop("sampling_params", {})
            return {name: history, "sampling_params": sampling, "stream": self.stream, **given}
        shown: dict[str, Any] = {"stream": self.stream}
        if self.stream:
            shown["stream_options"] = {"include_usage": True}
        name = "prompt" if self.api == "completions" else "messages"
        limits = {"max_tokens": output_tokens, "temperature": 0.0, **ends}
        return {"model": self.model, name: history, **limits, **shown, **self.extra}


def first_history(api: Api, prompt: Prompt) -> Prompt:
    """The first prompt in the API's form; refused if the API has none for it."""
    ids = isinstance(prompt, list) and all(isinstance(part, int) for part in prompt)
    if api == "chat":
        if ids:
            raise SettingsError("Chats take text, not token ids; choose another --dataset-name, such as random.")
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not ids and not isinstance(prompt, str):
        raise SettingsError("Messages need a chat back end, such as --backend openai-chat.")
    return prompt


def next_history(history: Prompt, answer: str, prompt: Prompt) -> Prompt:
    if isinstance(history, str):
        return f"{history}{answer}{prompt}"
    said: list[Message] = [{"role": "assistant", "content": answer}, {"role": "user", "content": str(prompt).strip()}]
    return [*history, *said]


# ---- reading answers


def read_native(record: Record, data: bytes, now_s: float) -> None:
    """SGLang's streams: every event has the whole text and all counts so far."""
    event = _decoded(data)
    meta = event.get("meta_info") or {}
    record.text = event.get("text") or ""
    record.prompt_tokens = meta.get("prompt_tokens") or record.prompt_tokens
    record.cached_tokens = meta.get("cached_tokens") or 0
    total = meta.get("completion_tokens")
    _add_tokens(record, 1 if total is None else total - record.output_tokens, now_s)


def read_openai(record: Record, data: bytes, now_s: float) -> None:
    """OpenAI's streams: every event has what is new; usage comes at the end."""
    event = _decoded(data)
    for choice in event.get("choices") or ():
        said = choice.get("delta") or choice.get("message") or {}
        text = (choice.get("text") or "") + (said.get("reasoning_content") or "") + (said.get("content") or "")
        record.text += text
        if (ids := choice.get("token_ids")) or text:
            _add_tokens(record, len(ids or "?"), now_s)
    if usage := event.get("usage"):
        record.prompt_tokens = usage.get("prompt_tokens") or record.prompt_tokens
        record.output_tokens = usage.get("completion_tokens") or record.output_tokens
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


# Each takes an event of a stream, or a whole answer, that came `now_s` after the request.
READERS: dict[Api, Callable[[Record, bytes, float], None]] = {
    "native": read_native,
    "completions": read_openai,
    "chat": read_openai,
}


def _decoded(data: bytes) -> dict[str, Any]:
    """SGLang's have a text and `meta_info`, OpenAI's choices and usage."""
    event = msgspec.json.decode(data, type=dict[str, Any])
    if (error := event.get("error")) is not None:
        raise HttpFailure(str(error.get("message", error) if isinstance(error, dict) else error))
    return event


def _add_tokens(record: Record, count: int, now_s: float) -> None:
    """Tokens that came together share the gap before them."""
    if count <= 0:
        return
    if record.output_tokens:
        record.gaps_s += [(now_s - record.total_s) / count] * count
    else:
        record.first_s = now_s
    record.output_tokens += count
    record.total_s = now_s
