"""Reads a worker's event stream so that another worker can continue it.

With `X-Bough-Resume: 1` a worker puts comments before its events: `: ids 12,34` where tokens were delivered, `: seed N`
once, and `: events N` where N events belong together. `ResumableText` removes them and keeps what a resumption needs. A
stream without them passes unchanged.
"""

import re
from typing import Any

import msgspec

from bough.gateway.peek import ResponseFields, read_response_fields

LISTS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
LENGTH = "output_token_logprobs_length"
DATA = b"data: "
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])  # what is not looked into stays as it is, byte for byte
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


# Each event of `/generate` repeats the logprobs of all tokens. After a failover the next worker has only its own.
Logprobs = dict[str, list[msgspec.Raw]]


def last_logprobs(delivered: bytes) -> Logprobs:
    found: Logprobs = {}
    for line in delivered.split(b"\n"):
        meta = _meta_info(line)
        if meta is not None:
            found = {name: _LIST.decode(meta[name]) for name in LISTS if name in meta}
    return found


def with_earlier(line: bytes, lists: Logprobs) -> bytes:
    """A line of the next worker, with the earlier logprobs in front of its own."""
    meta = _meta_info(line)
    if meta is None:
        return line
    for name, earlier in lists.items():
        if name in meta:
            meta[name] = _raw([*earlier, *_LIST.decode(meta[name])])
    if LENGTH in meta:
        meta[LENGTH] = _raw(len(lists.get(LISTS[0], ())) + msgspec.json.decode(meta[LENGTH], type=int))
    return DATA + msgspec.json.encode(_FIELDS.decode(line[len(DATA) :]) | {"meta_info": _raw(meta)})


def _meta_info(line: bytes) -> dict[str, msgspec.Raw] | None:
    """The `meta_info` of an event that has logprobs."""
    if not line.startswith(DATA) or b'"output_token_logprobs"' not in line:
        return None
    try:
        return _FIELDS.decode(_FIELDS.decode(line[len(DATA) :])["meta_info"])
    except (msgspec.MsgspecError, KeyError):
        return None


def _raw(content: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(content))


def with_fields(original: bytes, fields: bytes) -> bytes:
    """A request with fields behind those that are there, which may be many: the last of two with one name counts."""
    before = original.rstrip()[:-1].rstrip()
    return b"%s%s%s}" % (before, b"" if before.endswith(b"{") else b",", fields)


# ---- the stream


END = b"\n\n"
TAIL = 256
SEED, IDS, EVENTS = b": seed", b": ids", b": events"
SIGN = re.compile(rb": (?:ids(?: [\d, ]*)?|seed -?\d+|events \d+)")  # a whole line; others are somebody's own comments
# How nearly every event is, and nearly always comes alone.
ONE_EVENT = re.compile(rb": ids (\d+(?:,\d+)*)\n((?:event: content[^\n]*\n)?data: \{[^\n]*\n\n)")
ENDINGS = (b"data: [DONE]", b"event: message_stop")
# Of blocks, which have whole lines: one without an event, such as a keep-alive; one with a comment of the protocol; one
# with an error.
is_comment = re.compile(rb"(?:(?::[^\n]*)?\n)*").fullmatch
speaks = re.compile(rb"^(?:%b)$" % SIGN.pattern, re.MULTILINE).search
is_error = re.compile(rb'^(?:data: \{"error"|event: error)', re.MULTILINE).search
# What a worker says when it, and not the request, is the reason for the end of a stream.
WORKER_ERRORS = frozenset(
    {"server_error", "EngineDeadError", "ServiceUnavailableError", "InternalServerError"}
    | {"overloaded_error", "api_error", "PrefillUnavailableError"}
)


class WorkerFailedError(Exception):
    """The stream reports that its worker has failed."""


class CannotResumeError(Exception):
    """The worker started again instead of continuing the stream."""


class ResumableText:
    """One client's stream over all its workers; with `passes` it is not inspected."""

    def __init__(self, *, passes: bool = False) -> None:
        self.annotated: bool | None = False if passes else None  # not known before the first events
        self._ids: list[bytes] = []  # as they came, each with commas between them
        self.add_ids = self._ids.append
        self.delivered = False  # an event, and not only comments
        self._seed: int | None = None
        self._first: ResponseFields | None = None
        self.last = b""  # events that were delivered
        self._earlier: Logprobs = {}
        self._buffer = bytearray()
        self._finished = False
        self._failure: WorkerFailedError | None = None
        self._undecided = True  # whether the worker that it comes from speaks the protocol

    @property
    def output_ids(self) -> list[int]:
        return [int(number) for number in b",".join(self._ids).split(b",") if number.strip()]

    @property
    def resumable(self) -> bool:
        return not self.delivered or self.annotated is True

    @property
    def steady(self) -> bool:
        """Whether an event leaves without a look at it, but for ids that come with it."""
        if self.annotated is False:
            return self.delivered
        return not (self._buffer or self._undecided or self._earlier)

    def feed(self, data: bytes) -> bytes:
        """What may go to the client. If a resumable stream blames its worker, raises `WorkerFailedError` once all that
        came before is out."""
        if self._failure is not None:
            raise self._failure
        if self.annotated is False:
            self.delivered = self.delivered or bool(data)
            return data
        ready: list[bytes] = []
        if self.steady:
            at = 0
            while event := ONE_EVENT.match(data, at):
                ids, self.last = event.groups()
                self.add_ids(ids)
                at = event.end()
                if at == len(data) and not ready:
                    return self.last
                ready.append(self.last)
            data = data[at:]
        self._buffer += data
        try:
            while (group := self._next_group()) is not None:
                ready.append(group)
        except WorkerFailedError as error:
            if not ready:
                raise
            self._failure = error
        return b"".join(ready)

    def rest(self, tail: bytes | None = None) -> bytes:
        """What is left when the worker has closed the stream. A resumable stream must have reached its end mark; any
        other must where `tail`, what came last of it, is given."""
        if self._failure is not None:
            raise self._failure
        cut_off = tail is not None and not any(end in (tail + self._buffer)[-TAIL:] for end in ENDINGS)
        if cut_off or (self.annotated and not self._finished):
            raise WorkerFailedError("the stream ended before its answer did")
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def restart(self) -> None:
        """Another worker continues the stream; what was not passed on comes again."""
        self._buffer.clear()
        self._undecided, self._failure = True, None
        self._earlier = last_logprobs(self.last) or self._earlier

    def body(self, original: bytes) -> bytes:
        """The request for the rest of the stream."""
        if not self.delivered:
            return original
        resume: dict[str, Any] = {"output_ids": self.output_ids}
        if self._seed is not None:
            resume["seed"] = self._seed
        if self._first is not None and self._first.name is not None:
            resume["id"] = self._first.name
        if self._first is not None and isinstance(self._first.created, int):
            resume["created"] = self._first.created
        return with_fields(original, b'"resume":%s' % msgspec.json.encode(resume))

    def _next_group(self) -> bytes | None:
        buffer = self._buffer
        end = self._first_block()
        if end < 0:
            return self._pass_through() if b"\r" in buffer else None  # no worker of ours writes such lines
        first, count = bytes(buffer[: end + 2]), 1
        if self._undecided and not is_comment(first):
            self._decide(first)
            if self.annotated is False:
                return self._pass_through()
        for line in first.split(b"\n"):
            if line.startswith(EVENTS) and SIGN.fullmatch(line):
                count = int(line[len(EVENTS) :])
        for _ in range(count - 1):
            end = buffer.find(END, end + 2)
            if end < 0:
                return None
        group = bytes(buffer[: end + 2])
        del buffer[: end + 2]
        return self._deliver(group)

    def _first_block(self) -> int:
        """The end of the first block; protocol comments in blocks of their own are put into it."""
        buffer = self._buffer
        while (end := buffer.find(END)) >= 0:
            block = bytes(buffer[: end + 2])
            if not (is_comment(block) and speaks(block)):
                return end
            del buffer[end]
        return -1

    def _pass_through(self) -> bytes | None:
        if self.annotated:
            raise CannotResumeError("the worker began anew instead of going on with a stream")
        self.annotated, self.delivered = False, True
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest or None

    def _decide(self, first: bytes) -> None:
        """The worker uses this protocol if a comment stands before its first event, or before the second: an event
        without tokens needs none. An error may come first."""
        failed, ours = is_error(first), speaks(first)
        if failed:
            self._check_error(first)
        if self.annotated:
            if not (failed or ours or first.startswith(ENDINGS)):
                raise CannotResumeError("the worker began anew instead of going on with a stream")
        elif ours:
            self.annotated = True
        elif self.delivered or failed:
            self.annotated = False
        self._undecided = self.annotated is None

    def _deliver(self, group: bytes) -> bytes:
        if is_comment(group):
            return group
        if is_error(group):
            self._check_error(group)
        kept: list[bytes] = []
        for line in group.split(b"\n"):
            if not SIGN.fullmatch(line):
                kept.append(line)
                if self._first is None and line.startswith(b"data: {"):
                    self._first = read_response_fields(line[6:])
            elif line.startswith(IDS):
                self.add_ids(line[len(IDS) :])
            elif line.startswith(SEED):
                self._seed = int(line[len(SEED) :])
        self.delivered = True
        self._finished = ENDINGS[0] in kept or ENDINGS[1] in kept
        if self._earlier:
            kept = [with_earlier(line, self._earlier) for line in kept]
        self.last = b"\n".join(kept)
        return self.last

    def _check_error(self, group: bytes) -> None:
        for line in group.split(b"\n"):
            if line.startswith(b"data: {"):
                known = read_response_fields(line[6:])
                error = known.error if known is not None else None
                if isinstance(error, dict) and error.get("type") in WORKER_ERRORS:
                    raise WorkerFailedError(str(error.get("message")))
