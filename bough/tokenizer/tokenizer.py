"""The tokenizer of one model: text to ids, ids to text, conversations to prompts.

`TextBound` limits how much of a text is tokenised: a text as large as a request's body would take minutes and
gigabytes, only to be refused for its length. Its tokens are counted piece by piece until the outcome is known.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

from bough.core.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from bough.tokenizer.chat_template import ChatTemplate
from bough.tokenizer.incremental import IncrementalDecoder, TokenPieces, WindowDecoder, find_piece_rule

PIECE = 1 << 16  # characters that are counted at once
LEAST_BOUND = 1 << 18  # tokens: counting as many takes about a second, and some want to know how long a document is
BYTES_PER_TOKEN = 4  # of ordinary prompts; those that fit into the context are not looked at twice
Keep = Literal["beginning", "end", "all"]  # of a text that is too long, where the settings allow to cut it


@dataclass(frozen=True, slots=True)
class TextBound:
    """For a model that reads `context` tokens. A text with more than `tokens` tokens is refused or, with `cut`, read
    only so far that the engine, which cuts it to the token, still finds more than it can use."""

    context: int
    cut: bool = False
    least: int = LEAST_BOUND

    @property
    def tokens(self) -> int:
        """At least twice the context: pieces are counted by themselves, so a count may be somewhat too high."""
        return max(2 * self.context, self.least)

    def apply(self, text: str, count: Callable[[str], int], keep: Keep = "beginning") -> str:
        """What is to be encoded of the text: all of it, or what to `keep` where it may be cut."""
        most = BYTES_PER_TOKEN * self.tokens
        if len(text) <= most and (text.isascii() or len(text.encode(errors="replace")) <= most):
            return text  # it surely fits
        counted = 0
        for end in range(PIECE, len(text) + PIECE, PIECE):
            counted += count(text[-end : len(text) - end + PIECE] if keep == "end" else text[end - PIECE : end])
            if counted > self.tokens:
                if self.cut and keep != "all":
                    return text[-end:] if keep == "end" else text[:end]
                raise self.too_long(f"more than {self.tokens}")
        return text

    def too_long(self, tokens: str) -> RequestError:
        text = (
            f"The prompt of {tokens} tokens is longer than the model's context length of {self.context} tokens. "
            "Shorten the prompt."
        )
        return RequestError(text, field="input_ids", code=CONTEXT_LENGTH_EXCEEDED)


@dataclass(frozen=True, slots=True)
class Encoding:
    ids: list[int]


class PythonBackend:
    """A tokenizer written in Python, which a checkpoint brought along, with those of the library's methods that are
    called here. Nothing is known about how its tokens make text, so `decode` alone makes it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner  # a tokenizer of `transformers`

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Encoding]:
        return [Encoding(self._inner.encode(text, add_special_tokens=add_special_tokens)) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._inner.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        return text

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._inner.convert_tokens_to_ids(token)
        return found

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        return len(self._inner)

    def get_added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        special = set(self._inner.all_special_ids)
        return {
            token: tokenizers.AddedToken(self._inner.convert_ids_to_tokens(token), special=token in special)
            for token in {*self._inner.added_tokens_decoder, *special}
        }


GROUP = 1 << 20  # characters of texts that are encoded at once: what encodings cost is bounded by that


class Tokenizer:
    """One model's tokenizer; shared by all requests and safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer | PythonBackend,
        *,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.backend = backend
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        self.chat_template = chat_template
        self.bound: TextBound | None = None
        added: Mapping[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, added_token in added.items() if added_token.special)
        self.vocab_size: int = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.drops_first_space = False
        self._shown: TokenPieces | None = None
        self._skipped: TokenPieces | None = None
        if not isinstance(backend, PythonBackend) and (rule := find_piece_rule(backend)) is not None:
            token_bytes, self.drops_first_space = rule
            self._shown = TokenPieces(backend, token_bytes, hidden=frozenset())
            self._skipped = TokenPieces(backend, token_bytes, hidden=self.special_ids)

    def bounded(self, bound: TextBound) -> Tokenizer:
        """The same tokenizer for untrusted texts, which may be far too long."""
        twin = copy.copy(self)
        twin.bound = bound
        return twin

    # ---- text to ids

    def encode(self, text: str, add_special_tokens: bool = True, *, keep: Keep = "beginning") -> list[int]:
        """The ids of a text. Special tokens written in it are recognised; `add_special_tokens` adds those around it.
        `keep`: what is left of one that is over the bound, where it may be cut."""
        return next(self.encode_each([text], add_special_tokens, keep=keep))

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Many texts at once, on as many threads as the machine has."""
        return list(self.encode_each(texts, add_special_tokens))

    def encode_each(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, keep: Keep = "beginning"
    ) -> Iterator[list[int]]:
        """The same, a group of texts at a time: encodings are much larger than the ids that are taken from them."""
        group: list[str] = []
        size = 0
        for text in texts:
            if self.bound is not None:
                text = self.bound.apply(text, lambda piece: len(self._encode([piece], False)[0]), keep)
            if group and size + len(text) > GROUP:
                yield from self._encode(group, add_special_tokens)
                group, size = [], 0
            group.append(text)
            size += len(text)
        yield from self._encode(group, add_special_tokens)

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], int | None]]:
        """Pairs of texts as cross-encoders read them, each with the place of the first token of the second type."""
        if isinstance(self.backend, PythonBackend):
            raise RequestError("Pairs of texts need a tokenizer.json, which this model has not.")
        for text in {text for pair in pairs for text in pair}:
            _check_encodable(text)
        encodings = self.backend.encode_batch_fast(list(pairs))
        return [(each.ids, each.type_ids.index(1) if 1 in each.type_ids else None) for each in encodings]

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError):
            for text in texts:
                _check_encodable(text)
            raise
        return [encoding.ids for encoding in encodings]

    @property
    def first_token_text(self) -> str:
        """The special token that `encode` puts before every text; empty if it puts none."""
        added = self.encode("")[:1]
        return self.token_text(added[0]) if added and added[0] == self.bos_id else ""

    # ---- ids to text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids that stand alone; unknown ids show nothing."""
        decoder = self.decoder((), skip_special_tokens)
        return decoder.push(ids) + decoder.flush()

    def decoder(self, prompt_ids: Sequence[int], skip_special_tokens: bool) -> IncrementalDecoder | WindowDecoder:
        """What makes text of an answer's tokens as they come."""
        pieces = self.pieces(skip_special_tokens)
        if pieces is not None:
            return IncrementalDecoder(pieces, prompt_ids, self.drops_first_space)
        return WindowDecoder(self.backend_decode, lambda ids: self.visible(ids, skip_special_tokens), prompt_ids)

    def token_text(self, token: int) -> str:
        """One token as text, special or not, its leading space kept; U+FFFD where it is only part of a character."""
        return self.token_bytes(token).decode(errors="replace")

    def token_bytes(self, token: int, skip_special_tokens: bool = False) -> bytes:
        """What the token adds to a text."""
        pieces, ids = self.pieces(skip_special_tokens), [token]
        piece = self.backend_decode(self.visible(ids, skip_special_tokens)) if pieces is None else pieces[token]
        return piece.encode() if isinstance(piece, str) else piece

    def pieces(self, skip_special_tokens: bool) -> TokenPieces | None:
        return self._skipped if skip_special_tokens else self._shown

    def visible(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return [token for token in ids if 0 <= token < self.vocab_size and token not in hidden]

    def backend_decode(self, ids: list[int]) -> str:
        text: str = self.backend.decode(ids, skip_special_tokens=False)
        return text

    # ---- conversations to prompts

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The prompt of a conversation, with the options of `ChatTemplate.render`; encode it with
        `add_special_tokens=False`: the template writes them itself."""
        if self.chat_template is None:
            raise RequestError(
                "This model has no chat template; start the server with --chat-template (a Jinja file or text; "
                "Mistral's own format for a tekken.json comes with bough[mistral]), or use a completion endpoint.",
                field="messages",
            )
        return self.chat_template.render(messages, **options)


def _check_encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text holds a lone surrogate ({text[error.start]!r} at character {error.start}), which cannot be "
            "encoded as UTF-8; send valid Unicode."
        ) from None
