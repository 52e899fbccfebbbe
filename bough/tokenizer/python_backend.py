"""A tokenizer written in Python, which a checkpoint brought along, with the methods of the `tokenizers` library that
`Tokenizer` calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken


@dataclass(frozen=True, slots=True)
class Encoding:
    ids: list[int]


class PythonBackend:
    """Nothing is known about how its tokens make text, so `decode` alone makes it."""

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

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        special = set(self._inner.all_special_ids)
        return {
            token: AddedToken(self._inner.convert_ids_to_tokens(token), special=token in special)
            for token in {*self._inner.added_tokens_decoder, *special}
        }
