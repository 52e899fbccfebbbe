"""The few fields that the gateway reads in requests and responses, which pass unchanged.

A field may have any type: the worker refuses a body that it cannot use. In a prompt's text an image is a digest of
what the client sent of it, so that equal images go to one worker and long ones take no room in its tree.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from typing import Any

import msgspec

from bough.gateway.headers import Headers
from bough.gateway.policies import RoutingRequest


class RequestFields(msgspec.Struct):
    model: Any = None
    stream: Any = None
    priority: Any = None
    messages: Any = None
    system: Any = None
    prompt: Any = None
    text: Any = None
    input_ids: Any = None
    input: Any = None
    instructions: Any = None
    previous_response_id: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    images: Any = None


FIELDS = frozenset(RequestFields.__struct_fields__)
LARGE = 1 << 20  # bytes; a smaller body with few lists and objects is decoded in some milliseconds
MOST_INSIDE = 1 << 16  # brackets that open: what decoding takes longest for
MOST_VALUES, DEEPEST = 1 << 13, 16  # of a prompt that routing looks at: some milliseconds
LARGEST_ID = 2**31 - 1  # what caches compare; no vocabulary is near it
MOST_IDS = 2**17  # of a prompt that routing looks at: each takes far more memory than in the body
_REQUEST_DECODER = msgspec.json.Decoder(RequestFields)
_NOTHING = RequestFields()
NO_FILES = (None, None, None, None)
MEDIA_MARK = "\0media:"  # before a digest
# Where an image, clip or recording is inside of a message or a part; and what inside of that is its content.
MEDIA_FIELDS = ("images", "image_url", "video_url", "audio_url", "input_audio", "source")
CONTENT_FIELDS = ("url", "path", "data")


class Peek(msgspec.Struct, frozen=True, gc=False):
    model: str | None
    streams: bool
    priority: int
    routing: RoutingRequest
    previous_response_id: str | None
    not_json: str | None = None  # why the body is no JSON object


def is_heavy(body: bytes) -> bool:
    """Whether to decode it would block the event loop."""
    size = len(body)
    return size > MOST_INSIDE and (size > LARGE or body.count(b"{") + body.count(b"[") > MOST_INSIDE)


def peek(body: bytes, headers: Headers) -> Peek:
    fields, not_json = _NOTHING, None
    try:
        if body:
            fields = _REQUEST_DECODER.decode(body)
        text, ids = _prompt(fields)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        text, ids, not_json = "", None, str(error)
    except RecursionError:  # JSON that a worker may be able to read
        text, ids = "", None
    model = fields.model if isinstance(fields.model, str) and fields.model else None
    session = headers.get(b"x-smg-routing-key", headers.get(b"x-session-id"))
    target = headers.get(b"x-smg-target-worker")
    session_id = None if session is None else session.decode("latin-1")
    routing = RoutingRequest(model or "", text, ids, session_id, None if target is None else target.decode("latin-1"))
    priority = fields.priority if isinstance(fields.priority, int) else 0
    earlier = fields.previous_response_id
    named = earlier if isinstance(earlier, str) else None
    return Peek(model, fields.stream is True, priority, routing, named, not_json)


def _prompt(fields: RequestFields) -> tuple[str, tuple[int, ...] | None]:
    if fields.messages is not None:
        return _words(fields.system) + _words(fields.messages), None
    files = (fields.images, fields.image_data, fields.video_data, fields.audio_data)
    media = "" if files == NO_FILES else _words(list(files), media=True)
    for given in (fields.text, fields.prompt, fields.input_ids, fields.input):
        if given is None:
            continue
        if given.__class__ is str and not media and fields.instructions is None:
            return given + "\n", None  # as nearly always
        ids = _ids(given)
        if ids is not None:  # which have other ones in the places of media
            return media + " ".join(map(str, ids)), None if media else ids
        first = media if fields.instructions is None else media + _words(fields.instructions)
        return first + _words(given), None
    return "", None


def _ids(given: Any) -> tuple[int, ...] | None:
    """Token ids; of several prompts, the first."""
    if not isinstance(given, list) or not given:
        return None
    first = (given[0] if isinstance(given[0], list) else given)[:MOST_IDS]
    return tuple(first) if all(type(entry) is int and 0 <= entry <= LARGEST_ID for entry in first) else None


def _words(given: Any, *, media: bool = False) -> str:
    """All text in a prompt, a list of prompts, or messages with their roles; of very many values what the first say."""
    return "".join(islice(_pieces(given, media), MOST_VALUES))


def _pieces(given: Any, media: bool, depth: int = 0) -> Iterator[str]:
    inside: Iterable[tuple[Any, bool]] = ()
    if isinstance(given, str):
        known = not media or given.startswith(MEDIA_MARK)
        yield (given if known else MEDIA_MARK + media_hash(given.encode(errors="replace")).hexdigest()) + "\n"
    elif isinstance(given, list):
        inside = zip(given, repeat(media))
    elif isinstance(given, dict):
        names = CONTENT_FIELDS if media else ("role", *MEDIA_FIELDS, "content", "text")
        inside = [(given[name], media or name in MEDIA_FIELDS) for name in names if name in given]
    yield ""  # whatever it is, it counts
    if depth < DEEPEST:  # each level costs every piece below it
        for value, is_media in inside:
            yield from _pieces(value, is_media, depth + 1)


def media_hash(content: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(content, digest_size=16)


class ResponseFields(msgspec.Struct):
    """What the gateway reads in a response or event."""

    id: Any = None
    created: Any = None
    usage: Any = None
    meta_info: Any = None
    message: Any = None  # Anthropic's first event
    response: Any = None  # the events of /v1/responses
    error: Any = None

    @property
    def name(self) -> str | None:
        """The response's id, wherever its protocol puts it."""
        candidates = (self.id, *(_get(place, "id") for place in (self.message, self.response, self.meta_info)))
        return next((name for name in candidates if isinstance(name, str)), None)

    def prompt_tokens(self) -> tuple[int, int] | None:
        """(prompt tokens, cached tokens), if the worker reports both."""
        for usage in (self.usage, self.meta_info, self.message and _get(self.message, "usage")):
            if not isinstance(usage, dict):
                continue
            if "input_tokens" in usage and "cache_read_input_tokens" in usage:
                cached = _count(usage["cache_read_input_tokens"])
                return _count(usage["input_tokens"]) + cached, cached
            cached = _get(usage.get("prompt_tokens_details"), "cached_tokens", usage.get("cached_tokens"))
            if isinstance(cached, int) and usage.get("prompt_tokens"):
                return _count(usage["prompt_tokens"]), _count(cached)
        return None


_RESPONSE_DECODER = msgspec.json.Decoder(ResponseFields | list[Any])


def read_response_fields(body: bytes) -> ResponseFields | None:
    """None if the body is neither a JSON object nor a list (a native batch). A large body is not decoded, because that
    would block the event loop."""
    if len(body) > LARGE:
        begins, ends = body[:64].lstrip().startswith((b"{", b"[")), body[-64:].rstrip().endswith((b"}", b"]"))
        return ResponseFields() if begins and ends else None
    try:
        content = _RESPONSE_DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return content if isinstance(content, ResponseFields) else ResponseFields()


def _get(place: Any, name: str, otherwise: Any = None) -> Any:
    return place.get(name, otherwise) if isinstance(place, dict) else otherwise


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
