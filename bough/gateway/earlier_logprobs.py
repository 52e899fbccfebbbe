"""Logprobs of a native stream that goes on elsewhere.

Each event of `/generate` repeats the logprobs of all tokens from the stream's beginning. A worker that takes a stream
over has computed only what follows, so those of the tokens before are put in front of its own. Owns those.
"""

from __future__ import annotations

import msgspec

LISTS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
LENGTH = "output_token_logprobs_length"
DATA = b"data: "
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])  # what is not looked into stays as it is, byte for byte
_LIST = msgspec.json.Decoder(list[msgspec.Raw])


class EarlierLogprobs:
    """Those of the tokens that were delivered before the last worker took over; false while there are none."""

    def __init__(self) -> None:
        self._lists: dict[str, list[msgspec.Raw]] = {}

    def __bool__(self) -> bool:
        return bool(self._lists)

    def learn(self, delivered: bytes) -> None:
        """From the last event that the client has had."""
        for line in delivered.split(b"\n"):
            meta = _meta_info(line)
            if meta is not None:
                self._lists = {name: _LIST.decode(meta[name]) for name in LISTS if name in meta}

    def completed(self, events: bytes) -> bytes:
        """Events of the worker that took over, as they would have been without that."""
        return b"\n".join(map(self._complete, events.split(b"\n")))

    def _complete(self, line: bytes) -> bytes:
        meta = _meta_info(line)
        if meta is None:
            return line
        for name, earlier in self._lists.items():
            if name in meta:
                meta[name] = _raw([*earlier, *_LIST.decode(meta[name])])
        if LENGTH in meta:
            meta[LENGTH] = _raw(len(self._lists.get(LISTS[0], ())) + msgspec.json.decode(meta[LENGTH], type=int))
        event = _FIELDS.decode(line[len(DATA) :])
        return DATA + msgspec.json.encode(event | {"meta_info": _raw(meta)})


def _meta_info(line: bytes) -> dict[str, msgspec.Raw] | None:
    """That of an event which has logprobs in it."""
    if not line.startswith(DATA) or b'"output_token_logprobs"' not in line:
        return None
    try:
        return _FIELDS.decode(_FIELDS.decode(line[len(DATA) :])["meta_info"])
    except (msgspec.MsgspecError, KeyError):
        return None


def _raw(content: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(content))
