"""A tokenizer seen by a grammar: which bytes each token writes, which tokens end a text, and masks of tokens."""

import msgspec
import numpy as np
import numpy.typing as npt


class Vocabulary(msgspec.Struct, frozen=True):
    """Token bytes by id, as wide as the model's logits; it crosses processes. What writes nothing of its own (special
    tokens, ids beyond the tokenizer's) is empty, and no grammar allows it."""

    pieces: tuple[bytes, ...]
    stop_ids: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.pieces)

    @property
    def mask_words(self) -> int:
        return (len(self.pieces) + 31) // 32


# ---- masks: word i // 32, bit i % 32, as xgrammar and llguidance lay them out


def allow_only(tokens: tuple[int, ...], mask: npt.NDArray[np.int32]) -> None:
    mask.fill(0)
    allow_also(tokens, mask)


def allow_also(tokens: tuple[int, ...], mask: npt.NDArray[np.int32]) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << (token % 32))
