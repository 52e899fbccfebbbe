"""Reads request bodies: bounded, decoded straight into structs, checked, with errors that name the field.

Requests to generate accept unknown fields, because real clients send fields of their own: each is logged once, and the
answer has a warning. Management routes refuse them (their structs say so). Ranges and unsupported features stand in the
schemas.
"""

import asyncio
import contextlib
import functools
import gc
import itertools
import json
import logging
import math
import re
import typing
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from bough.core.errors import RequestError, nearest
from bough.core.files import table_beside
from bough.core.sampling_params import INT32_MAX, MAX_STOPS, NAME_SHOWN, require_few
from bough.core.server_settings import ServerSettings
from bough.server.errors import HttpError, client_name
from bough.server.held_bodies import HELD_KEY, HeldBody

log = logging.getLogger(__name__)

IDLE_FIELDS: dict[str, dict[str, str]] = table_beside(__file__, "idle_fields.toml")
MAX_DIAGNOSED_BYTES = 1 << 20  # bytes; a longer body would block the event loop too long


def validation_error(raw: bytes, complaint: str, struct: type[msgspec.Struct]) -> RequestError | None:
    """The error for JSON that does not fit the struct; None where the decoder's own message is good."""
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", complaint)
    if unknown is not None:
        name = unknown[1][:NAME_SHOWN]
        return RequestError(_unknown_text(name, struct), field=name)
    choice = re.fullmatch(r"Invalid enum value (.*) - at `\$\.(.*)`", complaint)
    if choice is not None:
        given, path = choice.groups()
        allowed = ", ".join(map(repr, _choices(struct, re.sub(r"\[.*?\]", "", path).split("."))))
        return RequestError(f"{path} must be one of {allowed}; got {given}.", field=path.split("[")[0])
    return _unrepresentable_value(raw) if complaint.startswith("Number out of range") else None


def _unrepresentable_value(raw: bytes) -> RequestError | None:
    """The first value that JSON can write, but Python's text and floats cannot hold."""
    if len(raw) > MAX_DIAGNOSED_BYTES:
        return None
    try:
        body = json.loads(raw, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    for path, value in _leaves(body, ""):
        field = path.rpartition(".")[2].split("[")[0] or None
        if isinstance(value, float) and not math.isfinite(value):
            return RequestError(f"{path} is a number that is too large to be represented.", field=field)
        if isinstance(value, str) and re.search(r"[\ud800-\udfff]", value):
            return RequestError(f"{path or 'The body'} holds a lone surrogate, which is no text.", field=field)
    return None


def _refuse(literal: str) -> None:
    raise ValueError(f"{literal} is no JSON")


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield path, name
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{i}]")
    else:
        yield path, value


def _choices(hint: Any, path: list[str]) -> list[Any]:
    found: list[Any] = []
    for kind in (hint, *_parts(hint)):
        if typing.get_origin(kind) is typing.Literal and not path:
            found += typing.get_args(kind)
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and path:
            hints = typing.get_type_hints(kind)
            found += _choices(hints[path[0]], path[1:]) if path[0] in hints else []
    return found


def _parts(hint: Any) -> Iterator[Any]:
    """The types that a type is made of: the members of a union, the elements of a list."""
    if typing.get_origin(hint) is not typing.Literal:
        for part in typing.get_args(hint):
            yield part
            yield from _parts(part)


# A number of tokens, -1 for the most there can be; the engine refuses 0, which would leave none.
TOKENS_OR_MOST = msgspec.Meta(extra_json_schema={"minimum": -1, "maximum": INT32_MAX, "not": {"const": 0}})


def unsupported(*harmless: Any) -> msgspec.Meta:
    """A feature that this engine does not have. `harmless` values ask for nothing, besides empty ones; with None among
    them even an empty one asks."""
    return msgspec.Meta(extra={"harmless": harmless})


UNSUPPORTED = unsupported()


def fields_without_effect(name: str, base: type[msgspec.Struct] = msgspec.Struct) -> type[msgspec.Struct]:
    """A base of fields that change nothing, and of those whose feature this engine does not have."""
    said = IDLE_FIELDS[name]
    fields: list[Any] = [(field, typing.Annotated[Any, UNSUPPORTED], None) for field in said["refused"].split()]
    fields += [(field, Any, None) for field in said["idle"].split()]
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True)


def between(low: float, high: float) -> msgspec.Meta:
    """The range of a number, for the OpenAPI page and for `check_ranges`, whose errors name both ends."""
    return msgspec.Meta(extra_json_schema={"minimum": low, "maximum": high})


def above(low: float, high: float) -> msgspec.Meta:
    """The same without the lower end."""
    return msgspec.Meta(extra_json_schema={"exclusiveMinimum": low, "maximum": high})


def check_ranges(request: msgspec.Struct) -> None:
    for name, (low, high, exclusive) in _ranges(type(request)).items():
        value = getattr(request, name)
        if value is None or (low <= value <= high and not (exclusive and value == low)):
            continue
        allowed = f"above {low} and at most {high}" if exclusive else f"between {low} and {high}"
        raise RequestError(f"{name} must be {allowed}, got {value}.", field=name)


def check_stops(stops: Any, name: str) -> None:
    if isinstance(stops, list):
        require_few(stops, name, MAX_STOPS)


def refuse_unsupported(request: msgspec.Struct) -> None:
    """Raises for the first field that asks for a feature which this engine does not have."""
    for name, harmless in unsupported_fields(type(request)).items():
        value = getattr(request, name)
        if value is None or value in harmless or (asks_nothing(value) and None not in harmless):
            continue
        raise RequestError(f"{name} is not supported by this server; leave it out.", field=name)


def asks_nothing(value: Any) -> bool:
    """Whether a field is empty; null and false ask for nothing also where they stand in a list or in an object."""
    if not value:
        return True
    left = [value]
    while left:
        if len(left) > MAX_EMPTY:
            return False
        match left.pop():
            case dict() as given:
                left += given.values()
            case list() as given:
                left += given
            case None | False:
                continue
            case _:
                return False
    return True


@functools.cache
def unsupported_fields(struct: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """With the values of each that ask for nothing, in the struct's order."""
    hints = typing.get_type_hints(struct, include_extras=True)
    notes = [(name, note) for name in struct.__struct_fields__ for note in getattr(hints[name], "__metadata__", ())]
    return {name: note.extra["harmless"] for name, note in notes if note.extra}


@functools.cache
def _ranges(struct: type[msgspec.Struct]) -> dict[str, tuple[float, float, bool]]:
    """By field, the range that its annotation gives, and whether the lower end is outside of it."""
    ranges = {}
    for name, hint in typing.get_type_hints(struct, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            schema = note.extra_json_schema or {}
            if "maximum" in schema and "not" not in schema:  # a range with a hole is the engine's to check and explain
                exclusive = "exclusiveMinimum" in schema
                low = schema["exclusiveMinimum" if exclusive else "minimum"]
                ranges[name] = (low, schema["maximum"], exclusive)
    return ranges


S = TypeVar("S", bound=msgspec.Struct)
EXACT_FLOAT = 1 << 53  # up to here a float holds every whole number
LARGE = 1 << 20  # bytes of a body that may hold very many objects
MOST_FIELDS, MOST_VALUES = 1 << 19, 1 << 21  # in a large body: full tables and more; decoded within half a second
MOST_FLOATS = 1 << 17  # of a body with a whole number that is written as a float: Python looks at each
PIECE, STRING = 1 << 16, re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
MAX_WARNINGS = 16  # about unknown fields in one answer
MAX_LOGGED_FIELDS = 1000  # unknown fields that are named in the log
MAX_EMPTY = 1000  # nulls in a field that asks for nothing: nobody needs more, and each is looked at
RECORDER_KEY, RECORDED_KEY = "bough.recorder", "bough.recorded"  # keys in the ASGI scope
SETTINGS_KEY = "bough.settings"  # key in the ASGI scope of the server's settings


def settings_of(request: Request) -> ServerSettings:
    settings: ServerSettings = request.scope[SETTINGS_KEY]
    return settings


async def read_body(request: Request, struct: type[S]) -> S:
    """The body as `struct`; an empty one counts as `{}`. Raises what becomes a 400 or, over the limit, a 413. Where the
    struct lets unknown fields through, they are named."""
    raw = await read_bytes(request)
    if len(raw) > LARGE:
        await count_values(raw)
    _unknown.set((struct, ()))
    body_bytes.set(len(raw))
    body = decode_body(raw, struct)
    if (recorder := request.scope.get(RECORDER_KEY)) is not None:
        request.scope[RECORDED_KEY] = recorder.add(request.scope["path"], raw or b"{}")
    if not struct.__struct_config__.forbid_unknown_fields:
        name_unknown_fields(request, raw or b"{}", struct)
    return body


def name_unknown_fields(request: Request, raw: bytes, struct: type[msgspec.Struct]) -> None:
    """In the log and in `warnings_of_body`; with --strict-fields they are refused."""
    unknown = _unknown_fields(raw, struct)
    if unknown and settings_of(request).strict_fields:
        raise RequestError(_unknown_text(unknown[0], struct, " (--strict-fields)"), field=unknown[0])
    path = request.scope["path"]
    for name in unknown:
        if (path, name) not in _logged_fields and len(_logged_fields) < MAX_LOGGED_FIELDS:
            _logged_fields.add((path, name))
            log.warning("%s: the field %r is unknown and has no effect; this is logged once", path, name)
    _unknown.set((struct, tuple(unknown[:MAX_WARNINGS])))


body_bytes: ContextVar[int] = ContextVar("bytes of the body of the request in progress", default=0)
_unknown: ContextVar[tuple[type[msgspec.Struct], tuple[str, ...]]] = ContextVar(
    "unknown fields of the request in progress", default=(msgspec.Struct, ())
)


def warnings_of_body() -> tuple[str, ...]:
    """What the client of the request in progress is told about its body, in its own words."""
    struct, names = _unknown.get()
    return tuple(_unknown_text(name, struct, " has no effect") for name in names)


async def read_bytes(request: Request) -> bytes:
    """The raw body, which counts as held until the response has ended."""
    held: HeldBody = request.scope[HELD_KEY]
    return await held.read(request.scope, request.receive)


async def count_values(raw: bytes) -> tuple[int, int]:
    """How many fields, lists and objects JSON has, and how many commas between its values. Too many are a 413: nothing
    else goes on while they are decoded. Looks at what is outside of strings, at one piece in a turn of the event loop.
    """
    at, inside, fields, values = 0, b"", 0, 0
    while at < len(raw):
        piece = raw[at : at + PIECE]
        piece = piece[: len(piece) - (len(piece) - len(piece.rstrip(b"\\"))) % 2]  # a backslash goes with what follows
        bare = STRING.sub(b"", inside + piece + b'"')  # which ends a string that is not whole, or begins one
        inside = b"" if bare.endswith(b'"') else b'"'
        at += max(1, len(piece))
        fields += bare.count(b":") + bare.count(b"[") + bare.count(b"{")
        values += bare.count(b",")
        if fields > MOST_FIELDS or values > MOST_VALUES:
            limits = f"{MOST_FIELDS} fields, lists and objects, or {MOST_VALUES} other values"
            raise HttpError(413, f"The body has more than {limits}; send fewer in one request.", "RequestTooLargeError")
        await asyncio.sleep(0)
    return fields, values


def decode_body(raw: bytes, struct: type[S]) -> S:
    """Bad JSON and wrong types raise; so does text that is not UTF-8."""
    try:
        with _garbage_collection_paused(len(raw)):
            return _decode(raw or b"{}", struct)
    except msgspec.ValidationError as error:
        raise (validation_error(raw, str(error), struct) or error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise (_unrepresentable_value(raw) or RequestError(f"The body is not valid JSON: {error}.")) from None


@contextlib.contextmanager
def _garbage_collection_paused(size: int) -> Iterator[None]:
    """The garbage collector looks at all new objects again and again while there are ever more of them; with a body of
    millions that takes ten times as long as reading it, and blocks the event loop meanwhile."""
    pauses = size > LARGE and gc.isenabled()
    if pauses:
        gc.disable()
    try:
        yield
    finally:
        if pauses:
            gc.enable()


def _decode(raw: bytes, struct: type[S]) -> S:
    try:
        return msgspec.json.decode(raw, type=struct)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        complaint, floats = error, itertools.count()

    def number(literal: str) -> int | float:
        """JSON does not distinguish 1 from 1.0, and neither do all clients; a whole number is accepted for either."""
        if next(floats) >= MOST_FLOATS:
            raise complaint
        value = float(literal)
        return int(value) if value.is_integer() and abs(value) <= EXACT_FLOAT else value

    return msgspec.convert(msgspec.json.Decoder(float_hook=number).decode(raw), struct)


def _unknown_text(name: str, struct: type[msgspec.Struct], more: str = "") -> str:
    """An unknown field is most often a misspelt one, or the engine's word for what the protocol calls otherwise."""
    theirs = client_name(own := name.rpartition(".")[2])
    near = nearest(name, _known_fields(struct)) if theirs == own else theirs.partition("#")[0]
    hint = f" Did you mean {near!r}?" if near else ""
    return f"Unknown field {name!r}{more}.{hint}"


_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)  # null: an object that was not given
_logged_fields: set[tuple[str, str]] = set()


def _unknown_fields(raw: bytes | msgspec.Raw, struct: type[msgspec.Struct], inside: str = "") -> list[str]:
    """The fields of a body that its struct does not have. `inside` is where in the body the object stands, such as
    "stream_options."."""
    known, objects, unknown = _known_fields(struct), _object_fields(struct), []
    for field, value in itertools.islice((_RAW_FIELDS.decode(raw) or {}).items(), 10 * MAX_LOGGED_FIELDS):
        name = inside + field
        if field in objects:
            unknown += _unknown_fields(value, objects[field], f"{name}.")
        if field not in known:
            unknown.append(name[:NAME_SHOWN])
    return unknown


@functools.cache
def _known_fields(struct: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(struct.__struct_encode_fields__)


@functools.cache
def _object_fields(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    found = {}
    for name, hint in typing.get_type_hints(struct).items():
        for kind in (hint, *typing.get_args(hint)):
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
                found[name] = kind
    return found


def given_fields(body: msgspec.Struct, names: Iterable[str]) -> dict[str, Any]:
    """Those of the named fields that the client gave: null counts as not given."""
    return {name: value for name in names if (value := getattr(body, name)) is not None}
