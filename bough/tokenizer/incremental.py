"""Text from tokens as they come: never half a character, never later than certain, the same in any chunking.

In byte-level BPE and in SentencePiece with byte fallback, text is the concatenation of the tokens' bytes, and a table
lookup is far cheaper than a call into a tokenizer. Any other decoder is run over a window of recent tokens. With
SentencePiece, a continuation keeps its leading space; where the prompt shows no text, the first space is dropped. Stray
bytes show as U+FFFD.
"""

import json
from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers

MAX_TOKEN_ID = 2**32 - 1  # what the tokenizers library can be asked about
SPACE_MARK = "▁"


class TokenPieces(dict[int, "str | bytes"]):
    """By token id: its text, if it is whole characters, else its bytes; nothing for hidden and unknown ids. Filled on
    first sight: a request meets a few hundred of a hundred thousand."""

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
        self[int(token)] = found = _as_text(b"" if token in self._hidden else self._token_bytes(spelling))
        return found


def _as_text(piece: bytes) -> str | bytes:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece  # part of a character, or no character at all


def find_piece_rule(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], bool] | None:
    """For a tokenizer whose text is the concatenation of its tokens' bytes: how these are spelt, and whether the
    decoder drops one space where the text begins. None for any other."""
    state: dict[str, Any] = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    match state.get("decoders", [state]):
        case [{"type": "ByteLevel"}]:
            return _byte_level_bytes, False
        case [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ]:
            match rest:
                case [] | [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
                    return _sentencepiece_bytes, bool(rest)
    return None


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


UNFINISHED = "\ufffd"  # how a decoder shows bytes that are no character (yet)
WINDOW_CONTEXT = 8  # tokens before the undecided ones that are decoded with them
WINDOW_PATIENCE = 8  # undecided tokens after which U+FFFD is believed: no character has more bytes


class IncrementalDecoder:
    """The growing text of one output. Ids in by `push`, certain text out; `flush` once at the end."""

    __slots__ = ("_at_start", "_pending", "_pieces")

    def __init__(self, pieces: TokenPieces, prompt_ids: Sequence[int], drops_first_space: bool) -> None:
        self._pieces = pieces
        self._pending = b""
        self._at_start = drops_first_space and not any(pieces[token] for token in prompt_ids)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens make certain."""
        pieces = self._pieces
        if len(ids) == 1 and not self._pending and not self._at_start:  # nearly every call of a running stream
            piece = pieces[ids[0]]
            if piece.__class__ is str:
                return piece
        text = "".join([self._decode_piece(pieces[token]) for token in ids])
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        """What remains when no more tokens come: an unfinished character shows as U+FFFD."""
        unfinished, self._pending = self._pending, b""
        return UNFINISHED if unfinished else ""

    def _decode_piece(self, piece: str | bytes) -> str:
        pending = self._pending
        if isinstance(piece, str):
            if not pending or not piece:
                return piece
            self._pending = b""
            return UNFINISHED + piece  # whole characters follow: what was pending will never be one
        data = pending + piece
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text


class WindowDecoder:
    """The same for tokenizers without such a table: decodes undecided tokens after a few earlier ones, and takes what
    they add to the text."""

    __slots__ = ("_context", "_decode", "_undecided", "_visible")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        visible: Callable[[Sequence[int]], list[int]],
        prompt_ids: Sequence[int],
    ) -> None:
        self._decode = decode
        self._visible = visible
        self._context = visible(prompt_ids)[-WINDOW_CONTEXT:]
        self._undecided: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        text = ""
        for token in self._visible(ids):  # one by one: what is certain must not depend on the chunking
            self._undecided.append(token)
            added = self._added()
            if not added.endswith(UNFINISHED) or len(self._undecided) >= WINDOW_PATIENCE:
                text += added
                self._settle()
        return text

    def flush(self) -> str:
        added = self._added()
        self._settle()
        return added

    def _added(self) -> str:
        if not self._undecided:
            return ""
        return self._decode(self._context + self._undecided)[len(self._decode(self._context)) :]

    def _settle(self) -> None:
        self._context = (self._context + self._undecided)[-WINDOW_CONTEXT:]
        self._undecided = []
