"""Logprobs in OpenAI's two forms: columns for completions, one object per token for chats and responses.

Tokens are often parts of characters. Their text then shows U+FFFD, as OpenAI's does, and `bytes` has the truth;
offsets into the text count the characters that were complete before a token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from bough.client.outputs import Entry, LogprobColumns
from bough.server.openai.objects import CompletionLogprobs, TokenLogprob, TopLogprob
from bough.tokenizer.tokenizer import Tokenizer

VERY_UNLIKELY = -9999.0  # OpenAI's number for a logprob that is not finite


class TokenSpeller:
    """Spells tokens; without a tokenizer they are shown as their numbers."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.token_text(token)

    def count(self, text: str) -> int:
        """How many tokens a part of an answer has, as the model would have written it."""
        return 0 if self._tokenizer is None or not text else len(self._tokenizer.encode(text, False))

    def spelling(self, token: int) -> bytes | None:
        return None if self._tokenizer is None else self._spelt(token, hide_special=False)

    def shown_bytes(self, token: int, skip_special_tokens: bool) -> bytes:
        """What the token adds to the answer's text."""
        return b"" if self._tokenizer is None else self._spelt(token, hide_special=skip_special_tokens)

    def _spelt(self, token: int, *, hide_special: bool) -> bytes:
        assert self._tokenizer is not None
        pieces = self._tokenizer.pieces(hide_special)
        if pieces is not None:
            piece = pieces[token]
        else:
            piece = self._tokenizer.backend_decode(self._tokenizer.visible([token], hide_special))
        return piece.encode() if isinstance(piece, str) else piece


class TextOffsets:
    """Where each next token of one answer begins in its text."""

    def __init__(self, speller: TokenSpeller, skip_special_tokens: bool) -> None:
        self._speller = speller
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def of(self, tokens: Iterable[int]) -> list[int]:
        offsets = []
        for token in tokens:
            offsets.append(self._length)
            shown = self._speller.shown_bytes(token, self._skip_special_tokens)
            self._length += len(self._decoder.decode(shown))
        return offsets


def completion_logprobs(
    columns: LogprobColumns, start: int, end: int, *, top: bool, speller: TokenSpeller, offsets: TextOffsets
) -> CompletionLogprobs:
    """The form of completions, for the tokens from `start` to `end`."""
    entries = columns.tokens[start:end]
    return CompletionLogprobs(
        tokens=[speller.text(token) for _, token, _ in entries],
        token_logprobs=[logprob for logprob, _, _ in entries],
        top_logprobs=_top_columns(entries, columns.top[start:end], speller) if top else None,
        text_offset=offsets.of(token for _, token, _ in entries),
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    tops = None
    if first.top_logprobs is not None and second.top_logprobs is not None:
        tops = first.top_logprobs + second.top_logprobs
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=tops,
        text_offset=first.text_offset + second.text_offset,
    )


def chat_logprobs(columns: LogprobColumns, start: int, end: int, speller: TokenSpeller) -> list[TokenLogprob]:
    """The form of chats and responses, for the tokens from `start` to `end`."""
    tops = columns.top[start:end]
    return [
        TokenLogprob(
            speller.text(token),
            _finite(logprob),
            _byte_values(speller, token),
            [TopLogprob(speller.text(t), _finite(p), _byte_values(speller, t)) for p, t, _ in top or ()],
        )
        for (logprob, token, _), top in zip(columns.tokens[start:end], tops, strict=True)
    ]


def mean_logprob(columns: LogprobColumns, count: int) -> float:
    """How likely an answer of `count` tokens is, per token: what `best_of` chooses by."""
    values = [_finite(logprob) for logprob, _, _ in columns.tokens[:count]]
    return sum(values) / len(values) if values else 0.0


def _top_columns(
    entries: Sequence[Entry], tops: Sequence[list[Entry] | None], speller: TokenSpeller
) -> list[dict[str, float] | None]:
    """By text; of two tokens that look alike the likelier counts. The token that was taken is always among them."""
    columns: list[dict[str, float] | None] = []
    for (logprob, token, _), top in zip(entries, tops, strict=True):
        if top is None:
            columns.append(None)
            continue
        by_text: dict[str, float] = {}
        for other_logprob, other, _ in (*top, (logprob, token, None)):
            by_text.setdefault(speller.text(other), _finite(other_logprob))
        columns.append(by_text)
    return columns


def _finite(logprob: float | None) -> float:
    return VERY_UNLIKELY if logprob is None else logprob


def _byte_values(speller: TokenSpeller, token: int) -> list[int] | None:
    spelt = speller.spelling(token)
    return None if spelt is None else list(spelt)
