"""A tokenizer whose tokens are bytes: what it decodes can be seen at a glance, and half characters are easy to make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bough.tokenizer.incremental import TokenPieces, WindowDecoder


class ByteTokenizer:
    """Token i is byte i; there are no special tokens. Decoding goes the way of unknown decoders: by windows."""

    drops_first_space = False
    vocab_size = 256

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        return list(self.encode_each(texts))

    def encode_each(self, texts: Sequence[str], **how: str) -> Iterator[list[int]]:
        return (list(text.encode()) for text in texts)

    def pieces(self, skip_special_tokens: bool) -> TokenPieces | None:
        return None

    def visible(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        return list(ids)

    def backend_decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def token_text(self, token: int) -> str:
        return self.backend_decode([token])

    def token_bytes(self, token: int, skip_special_tokens: bool = False) -> bytes:
        return self.token_text(token).encode()

    def decoder(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> WindowDecoder:
        return WindowDecoder(self.backend_decode, list, prompt_ids)
