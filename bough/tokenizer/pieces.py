"""What each token contributes to the text, as a table that is filled while it is read.

Nearly every generating model uses byte-level BPE (a token is a run of bytes, written in GPT-2's printable alphabet) or
SentencePiece with byte fallback (text with `▁` for a space, or one byte written `<0x0A>`). In both, the text is the
concatenation of the tokens' bytes, and a table lookup costs tens of nanoseconds where a call into a tokenizer costs
microseconds. `find_piece_rule` recognises the two by their decoder; others decode by themselves (`incremental`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tokenizers

MAX_TOKEN_ID = 2**32 - 1  # what the tokenizers library can be asked about
SPACE_MARK = "▁"


class TokenPieces(dict[int, "str | bytes"]):
    """By token id: its text, if it is whole characters by itself, else its bytes. Hidden and unknown ids give no text.

    Filled on first sight: a request meets a few hundred of a vocabulary's hundred thousands.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, token_bytes: Callable[[str], bytes], hidden: frozenset[int]
    ) -> None:
        super().__init__()
        self._backend = backend
        self._token_bytes = token_bytes
        self._hidden = hidden

    def __missing__(self, token: int) -> str | bytes:
        spelling = self._backend.id_to_token(token) if 0 <= token <= MAX_TOKEN_ID else None
        if spelling is None:
            return ""  # not kept: clients may name any id, and the table must not grow with them
        piece = b"" if token in self._hidden else self._token_bytes(spelling)
        self[int(token)] = found = _as_text(piece)
        return found


def _as_text(piece: bytes) -> str | bytes:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece  # part of a character, or no character at all


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How a family of tokenizers spells bytes, and whether its decoder drops one space where the text begins."""

    token_bytes: Callable[[str], bytes]
    drops_first_space: bool


def find_piece_rule(backend: tokenizers.Tokenizer) -> PieceRule | None:
    """The rule of a tokenizer whose text is the concatenation of its tokens' bytes; None for any other."""
    match _decoder_steps(backend):
        case [{"type": "ByteLevel"}]:
            return PieceRule(_byte_level_bytes, drops_first_space=False)
        case [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ]:
            match rest:
                case []:
                    return PieceRule(_sentencepiece_bytes, drops_first_space=False)
                case [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
                    return PieceRule(_sentencepiece_bytes, drops_first_space=True)
    return None


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    return steps


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes for U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()


def _byte_level_bytes(spelling: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHAR[char] for char in spelling])
    except KeyError:
        return spelling.encode()  # an added token, spelt as plain text


def _sentencepiece_bytes(spelling: str) -> bytes:
    if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
        try:
            return bytes.fromhex(spelling[3:5])
        except ValueError:
            pass  # not a byte: a token that only looks like one
    return spelling.replace(SPACE_MARK, " ").encode()
