"""Reads request bodies: bounded, decoded straight into structs, with errors that name the field.

Native requests refuse fields that nobody knows (their structs say so); on the routes of other protocols such fields are
let through and named once in the log, because real clients send fields of their own.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import gc
import itertools
import logging
import re
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from bough.core.errors import RequestError
from bough.core.settings import ServerSettings
from bough.server.errors import HttpError
from bough.server.json_faults import unacceptable, unreadable

log = logging.getLogger(__name__)

S = TypeVar("S", bound=msgspec.Struct)
MEBIBYTE = 1 << 20
EXACT_FLOAT = 1 << 53  # up to here a float holds every whole number
LARGE = MEBIBYTE  # bytes of a body that may hold very many objects
MAX_NOTICED, NAME_SHOWN = 1000, 100  # unknown fields that are named in the log, and how much of their names
SETTINGS_KEY = "bough.settings"  # where the application leaves the server's settings for its endpoints


def settings_of(request: Request) -> ServerSettings:
    settings: ServerSettings = request.scope[SETTINGS_KEY]
    return settings


async def read_body(request: Request, struct: type[S]) -> S:
    """The body as `struct`; an empty one counts as `{}`. Raises what becomes a 400 or, over the limit, a 413."""
    return decode_body(await read_bytes(request), struct)


async def read_lenient_body(request: Request, struct: type[S]) -> S:
    """The same for structs that let unknown fields through: those are named in the log, or, with --strict-fields,
    refused."""
    raw = await read_bytes(request)
    body = decode_body(raw, struct)
    _notice_unknown(raw or b"{}", struct, request.scope["path"], strict=settings_of(request).strict_fields)
    return body


async def read_bytes(request: Request) -> bytes:
    """The raw body, refused as soon as it is known to be over the limit."""
    limit = settings_of(request).max_body_mb * MEBIBYTE
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
    return b"".join(chunks)


def decode_body(raw: bytes, struct: type[S]) -> S:
    """Bad JSON and wrong types raise; so does text that is not UTF-8."""
    try:
        with _undisturbed(len(raw)):
            body: S = _decode(raw or b"{}", struct)
    except msgspec.ValidationError as error:
        _suggest_field(str(error), struct)
        better = unacceptable(raw, str(error), struct)
        raise (better or error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(raw, error) from None
    return body


@contextlib.contextmanager
def _undisturbed(size: int) -> Iterator[None]:
    """The garbage collector looks at all new objects again and again while there are ever more of them; with a body of
    millions that takes ten times as long as reading it, and nobody is served meanwhile."""
    pauses = size > LARGE and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


def _decode(raw: bytes, struct: type[S]) -> S:
    body: S
    try:
        body = decoder_of(struct).decode(raw)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        body = msgspec.convert(_WHOLE_NUMBERS.decode(raw), struct)
    return body


def _number(literal: str) -> int | float:
    """JSON does not tell 1 from 1.0, and neither do all clients; a number that is whole may stand for either."""
    value = float(literal)
    return int(value) if value.is_integer() and abs(value) <= EXACT_FLOAT else value


_WHOLE_NUMBERS = msgspec.json.Decoder(float_hook=_number)


def _suggest_field(complaint: str, struct: type[msgspec.Struct]) -> None:
    """An unknown field is most often a misspelt one."""
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", complaint)
    if unknown is not None:
        near = difflib.get_close_matches(unknown[1], _known_fields(struct), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RequestError(f"Unknown field {unknown[1]!r}.{hint}", field=unknown[1]) from None


@functools.cache
def decoder_of(struct: type[S]) -> msgspec.json.Decoder[S]:
    return msgspec.json.Decoder(struct)


_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)  # null: an object that was not given
_noticed: set[tuple[str, str]] = set()


def _notice_unknown(
    raw: bytes | msgspec.Raw, struct: type[msgspec.Struct], path: str, *, strict: bool, inside: str = ""
) -> None:
    """`inside` is where in the body the object stands, such as "stream_options."."""
    known, objects = _known_fields(struct), _object_fields(struct)
    for field, value in itertools.islice((_RAW_FIELDS.decode(raw) or {}).items(), 10 * MAX_NOTICED):
        name = inside + field
        if field in objects:
            _notice_unknown(value, objects[field], path, strict=strict, inside=f"{name}.")
        if field in known:
            continue
        if strict:
            raise RequestError(f"Unknown field {name!r} (--strict-fields).", field=name)
        name = name[:NAME_SHOWN]
        if (path, name) not in _noticed and len(_noticed) < MAX_NOTICED:
            _noticed.add((path, name))
            log.warning("%s: the field %r is unknown and has no effect; this is said once", path, name)


@functools.cache
def _known_fields(struct: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(struct.__struct_encode_fields__)


@functools.cache
def _object_fields(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Those fields that hold an object with fields of its own."""
    found = {}
    for name, hint in typing.get_type_hints(struct).items():
        for kind in (hint, *typing.get_args(hint)):
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                found[name] = kind
    return found


def _too_large(limit: int) -> HttpError:
    return HttpError(413, f"The body is larger than {limit // MEBIBYTE} MiB (--max-body-mb).", "RequestTooLargeError")


def given_fields(body: msgspec.Struct, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the named fields that the client gave: null counts as not given."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}
