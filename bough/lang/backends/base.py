"""What the interpreter asks of a back end, and the values that pass between them.

Everything asynchronous is called on the language's own event loop, and a cancelled call must end the request behind it.
What a back end cannot do it refuses with a `RequestError`.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path
from typing import Any

from bough.core.errors import RequestError
from bough.lang.chat import ChatFormat, NoChat
from bough.lang.choices import Scores
from bough.lang.loop import wait_for

LOGPROB_OPTIONS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
OPTIONS = (*LOGPROB_OPTIONS, "lora_path")  # of a request, beside its sampling


@dataclass(frozen=True, slots=True)
class GenRequest:
    """One generation: the text so far, the same as messages, and how to go on."""

    text: str
    messages: Sequence[Mapping[str, Any]]  # complete ones; the last is the one being written, if that has begun
    sampling: Mapping[str, Any]  # the engine's names; unset values are left out
    options: Mapping[str, Any] = field(default_factory=dict)  # OPTIONS
    images: Sequence[str | bytes] = ()
    videos: Sequence[tuple[str, int]] = ()


@dataclass(slots=True)
class GenOutput:
    """What came back, complete or, in a stream, up to now. With n > 1 there are several texts and metas."""

    texts: list[str]
    metas: list[dict[str, Any]]


@dataclass(slots=True)
class Usage:
    """Totals over requests. Cached tokens are part of the prompt's."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, meta: Mapping[str, Any]) -> None:
        self.requests += 1
        self.prompt_tokens += meta.get("prompt_tokens") or 0
        self.cached_tokens += meta.get("cached_tokens") or 0
        self.completion_tokens += meta.get("completion_tokens") or 0

    def reset(self) -> None:
        self.requests = self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0

    def __add__(self, other: Usage) -> Usage:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Usage(*(mine + theirs for mine, theirs in pairs))


class Backend(ABC):
    """One place where programs run. `chat_only`: it takes messages and cannot continue a text."""

    chat_only = False
    has_adapters = True  # whether `lora_path` may name one
    chat_format: ChatFormat = NoChat()  # how roles become text

    def __init__(self) -> None:
        self.token_usage = Usage()  # of all programs

    @abstractmethod
    async def generate(self, request: GenRequest) -> GenOutput:
        """The whole answer."""

    @abstractmethod
    def stream(self, request: GenRequest) -> AsyncIterator[GenOutput]:
        """The answer as it grows; each output shows all of it."""

    async def score(self, text: str, choices: Sequence[str], *, unconditional: bool) -> Scores:
        """How likely each choice is after the text."""
        told = f"{type(self).__name__} cannot score given texts, so select() and choices do not work there; use gen()."
        raise RequestError(told)

    async def async_cache_prefix(self, text: str) -> None:  # noqa: B027  # a back end without a cache has nothing to do
        """Makes the text cheap to start from."""

    async def async_flush_cache(self) -> bool:
        """Forgets all cached prefixes; whether it did."""
        return False

    async def async_server_info(self) -> dict[str, Any]:
        """Settings, limits and load of what is behind."""
        return {}

    # For users --------------------------------------------------------------------------------------------------------

    def cache_prefix(self, text: str) -> None:
        wait_for(self.async_cache_prefix(text))

    def flush_cache(self) -> bool:
        return wait_for(self.async_flush_cache())

    def get_server_info(self) -> dict[str, Any]:
        return wait_for(self.async_server_info())


class NativeBackend(Backend):
    """What speaks the engine's own API, in this process or at a server."""

    @abstractmethod
    async def ask(self, body: dict[str, Any]) -> Any:
        """The answer to the body of a `/generate`."""

    @abstractmethod
    async def encode(self, texts: list[str]) -> list[list[int]]:
        """The token ids of texts."""

    async def generate(self, request: GenRequest) -> GenOutput:
        return output_of(await self.ask(body_of(request)))

    async def score(self, text: str, choices: Sequence[str], *, unconditional: bool) -> Scores:
        """ "is " + "yes" may be tokenised as "is" + " yes", so text and text + choice are tokenised whole. The tokens
        that count begin where the first of them differs from the text alone, at the same place for all choices, so that
        probabilities after the same tokens are compared."""
        text_ids, *full_ids = await self.encode([text, *(text + choice for choice in choices)])
        common = [len(commonprefix([text_ids, ids])) for ids in full_ids]  # noqa: RUF071  # not of paths
        border = min(*common, *(len(ids) - 1 for ids in full_ids))
        if border < 1:
            raise RequestError("select() scores its choices after some text; add text to the state before it.")
        alone = [ids[border:] for ids in full_ids] if unconditional else []
        body = {
            "input_ids": full_ids + alone,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": [border - 1] * len(full_ids) + [0] * len(alone),
            "return_text_in_logprobs": True,
        }
        metas = output_of(await self.ask(body)).metas
        entries = [meta["input_token_logprobs"] for meta in metas]
        tokens = [
            # A token that the model holds for impossible has no number in JSON.
            [(-math.inf if logprob is None else logprob, token, shown) for logprob, token, shown in given[1:]]
            for given in entries[: len(choices)]  # of which the first is the token before those that are scored
        ]
        return Scores(tokens, entries[len(choices) :] or None, metas)

    async def async_cache_prefix(self, text: str) -> None:
        await self.ask({"text": text, "sampling_params": {"max_new_tokens": 0}})


def body_of(request: GenRequest) -> dict[str, Any]:
    body = {"text": request.text, "sampling_params": dict(request.sampling), **request.options}
    if request.images:
        body["image_data"] = [media_url(source) for source in request.images]
    if request.videos:
        body["video_data"] = [{"url": media_url(path), "num_frames": frames} for path, frames in request.videos]
    return body


def stops_of(fields: Mapping[str, Any]) -> list[str]:
    stop = fields.get("stop") or ()
    return [stop] if isinstance(stop, str) else list(stop)


def output_of(answer: Any) -> GenOutput:
    """An engine's output, or the list of them that n > 1 gives."""
    outputs = answer if isinstance(answer, list) else [answer]
    for output in outputs:
        reason = output["meta_info"]["finish_reason"]
        if reason is not None and reason["type"] == "abort":
            raise RequestError(reason.get("message") or "The request was aborted.")
    return GenOutput([output["text"] for output in outputs], [output["meta_info"] for output in outputs])


MARKS = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif"}
ADDRESSES = ("http://", "https://", "data:")


def media_url(source: str | bytes) -> str:
    """The address of a picture or film; one that has none is in it."""
    if isinstance(source, str) and source.startswith(ADDRESSES):
        return source
    media_type, data = image_data(source)
    return f"data:{media_type};base64,{data}"


def image_data(source: str | bytes) -> tuple[str, str]:
    """(media type, base64) of a picture given as bytes, as a file or in base64."""
    raw = _read(source) if isinstance(source, str) else source
    return _media_type(raw) or "application/octet-stream", base64.b64encode(raw).decode()


def _read(source: str) -> bytes:
    try:
        return Path(source).read_bytes()
    except OSError as error:
        with contextlib.suppress(ValueError):
            raw = base64.b64decode(source, validate=True)
            if _media_type(raw) is not None:
                return raw
        raise RequestError(f"The file {source!r:.80} cannot be read: {error.strerror}.") from None


def _media_type(raw: bytes) -> str | None:
    found = next((kind for mark, kind in MARKS.items() if raw.startswith(mark)), None)
    return found or ("image/webp" if raw[8:12] == b"WEBP" else "video/mp4" if raw[4:8] == b"ftyp" else None)
