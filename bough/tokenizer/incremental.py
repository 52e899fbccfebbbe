"""Text from tokens as they come: never half a character, never later than certain, the same in any chunking.

For a prompt P and output ids O the joined text is `decode(O)` for byte-level BPE. For SentencePiece it is what O adds,
`decode(P + O)[len(decode(P)):]`, so that a continuation keeps its leading space; where P shows no text, the first space
is dropped, as the decoder does. Any other decoder is run over a window of recent tokens. Stray bytes show as U+FFFD and
leave the valid characters beside them alone. `Tokenizer.decode` uses this class too, so streams and whole texts agree.

Owns the bytes of an unfinished character of one request. Stop strings are left to `stops`.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import Protocol

from bough.tokenizer.pieces import TokenPieces

UNFINISHED = "\ufffd"  # how a decoder shows bytes that are no character (yet)
WINDOW_CONTEXT = 8  # tokens before the undecided ones that are decoded with them
WINDOW_PATIENCE = 8  # undecided tokens after which U+FFFD is believed: no character has more bytes


class PieceSource(Protocol):
    """What decoding needs of a tokenizer."""

    @property
    def drops_first_space(self) -> bool: ...

    def pieces(self, skip_special_tokens: bool) -> TokenPieces | None:
        """The table of contributions; None when this tokenizer's text is not a concatenation."""
        ...

    def visible(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """The ids that show in the text."""
        ...

    def backend_decode(self, ids: list[int]) -> str:
        """All of these ids as text, by the tokenizer's own decoder."""
        ...


class IncrementalDecoder:
    """The growing text of one output. Ids in by `push`, certain text out; `flush` once at the end."""

    __slots__ = ("_at_start", "_pending", "_pieces", "_window")

    def __init__(self, tokenizer: PieceSource, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._pieces = tokenizer.pieces(skip_special_tokens)
        self._pending = b""
        self._at_start = False
        self._window: _Window | None = None
        pieces = self._pieces
        if pieces is None:
            context = tokenizer.visible(prompt_ids, skip_special_tokens)[-WINDOW_CONTEXT:]
            self._window = _Window(
                tokenizer.backend_decode, lambda ids: tokenizer.visible(ids, skip_special_tokens), context
            )
        elif tokenizer.drops_first_space:
            self._at_start = not any(pieces[token] for token in prompt_ids)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these tokens make certain."""
        pieces = self._pieces
        if pieces is None:
            assert self._window is not None
            return self._window.push(ids)
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
        if self._window is not None:
            return self._window.flush()
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


class _Window:
    """Decodes undecided tokens after a few earlier ones, and takes what they add to the text."""

    __slots__ = ("_context", "_decode", "_undecided", "_visible")

    def __init__(
        self, decode: Callable[[list[int]], str], visible: Callable[[Sequence[int]], list[int]], context: list[int]
    ) -> None:
        self._decode = decode
        self._visible = visible
        self._context = context
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
