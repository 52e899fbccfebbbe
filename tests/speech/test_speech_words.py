"""Words and their places beside Transformers' own functions: its time warping, and how it makes words of tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter
from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

from bough.executor.hearing import smooth
from bough.speech.words import first_positions, words_of


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (7, 200), (40, 39), (60, 20)])
def test_paths_are_those_of_transformers(shape: tuple[int, int]) -> None:
    attended = np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)
    tokens, positions = _dynamic_time_warping(-attended.astype(np.float64))
    assert first_positions(attended).tolist() == [min(positions[tokens == token]) for token in range(shape[0])]


@pytest.mark.parametrize("positions", [3, 4, 50])
def test_weights_are_smoothed_as_transformers_does(positions: int) -> None:
    weights = torch.rand(5, 6, positions, generator=torch.Generator().manual_seed(0))
    deviation, mean = torch.std(weights, dim=-2, keepdim=True, unbiased=False), weights.mean(-2, keepdim=True)
    theirs = _median_filter(((weights - mean) / deviation)[None], 7)[0].mean(0)
    torch.testing.assert_close(smooth(weights, 7), theirs)


def test_a_single_token_takes_all_positions() -> None:
    assert first_positions(smooth(torch.rand(2, 1, 30), 7).numpy()).tolist() == [0]


class Bytes:
    """A tokenizer whose tokens are given pieces of bytes."""

    language = eos_token_id = None

    def __init__(self, *pieces: bytes) -> None:
        self.pieces, self.eos_token_id = pieces, len(pieces)

    def decode(self, tokens: list[int], decode_with_timestamps: bool = True) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize("language", ["english", "japanese"])
@pytest.mark.parametrize(
    "pieces",
    [
        [b" Hel", b"lo", b",", b" the", b"re", b"!", b" ..."],
        [b'"', b"Hi", b'."', b" (", b' "', b"Well", b")", b".", b" -", b" yes", b" ["],
        ["はい".encode()[:2], "はい".encode()[2:4], "はい".encode()[4:], "。".encode(), b" a", b"\xff", b"b", b" \xc3"],
        [b"x", b" ", b".", b" ", b"y"],
    ],
)
def test_words_are_those_of_transformers(pieces: list[bytes], language: str) -> None:
    tokenizer = Bytes(*pieces)
    words, _, places = _combine_tokens_into_words(tokenizer, list(range(len(pieces))), language)
    ours = words_of(range(len(pieces)), tokenizer.decode, {"japanese": "ja"}.get(language, "en"))
    assert ours == list(zip(words, places, strict=True))
