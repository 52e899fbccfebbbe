"""Chunks of streams, for speed: what is the same in all chunks of a stream is encoded once.

A stream's chunks differ in text and token ids alone, until the last. `PreparedChunk` takes an empty one, as the schema
writes it, and remembers the bytes around the places to fill, so what it makes is what the schema would have made.
"""

from __future__ import annotations

from bough.server.responses import encode_json

EMPTY_IDS = b'"token_ids":[]'


class PreparedChunk:
    """A chunk with room for text and, if it shows them, token ids."""

    def __init__(self, chunk: bytes, text_field: str) -> None:
        """`chunk` is ready to be sent, with empty text and, to show ids, an empty list of them."""
        # Inside JSON strings quotes are escaped, so the first match is the field itself, whatever the model's name.
        place = b'"%b":""' % text_field.encode()
        before, found, after = chunk.partition(place)
        assert found, f"the chunk has no empty {text_field}"
        self._before = before + place[:-2]
        middle, found, end = after.partition(EMPTY_IDS)
        self._shows_ids = bool(found)
        self._middle = middle + EMPTY_IDS[:-2] if found else after
        self._end = end

    def fill(self, text: str, ids: list[int]) -> bytes:
        if self._shows_ids:
            return b"".join((self._before, encode_json(text), self._middle, encode_json(ids), self._end))
        return b"".join((self._before, encode_json(text), self._middle))
