"""Forced text as tokens, as the model's own tokenizer would have made them.

In front, the text may join with tokens that already stand. Behind, its last tokens may join with what is sampled next:
they are held back, and the model samples them itself under the grammar's mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix

CONTEXT_TOKENS = 4  # of what stands, encoded together with the forced text
FOLLOWERS = ("a", "Z", "7", " ", '"', "}", "]", ",", ":", "-", ".", "\n", "<", "\\", "é")  # what a text may go on with


@dataclass(frozen=True, slots=True)
class Seam:
    """Take `cut` tokens from the end of what stands, then append `tokens`."""

    cut: int
    tokens: tuple[int, ...]


NOTHING = Seam(0, ())


def retokenise(
    encode: Callable[[str], Sequence[int]],
    piece: Callable[[int], bytes],
    tail: Sequence[int],
    forced: bytes,
    *,
    final: bool = False,
    max_cut: int = 0,
) -> Seam:
    """The tokens of `forced` behind `tail`, the last tokens that stand. `final`: the text ends here, so nothing is held
    back. At most `max_cut` tokens that stand are replaced; if more would have to be, nothing is appended."""
    text = _whole_characters(forced)
    if not text:
        return NOTHING
    for length in range(min(CONTEXT_TOKENS, len(tail)), -1, -1):
        context = list(tail[len(tail) - length :])
        before = _decode(context, piece)
        if before is None or (length and list(encode(before)) != context):
            continue  # it begins inside a character or a word, or the model spelt it in a way of its own
        seam = _join(encode, context, before, text, final, max_cut)
        written = b"".join(map(piece, (*context[: length - seam.cut], *seam.tokens)))
        return seam if (before + text).encode().startswith(written) else NOTHING  # it adds blanks or special tokens
    return NOTHING


def _join(
    encode: Callable[[str], Sequence[int]], context: list[int], before: str, text: str, final: bool, max_cut: int
) -> Seam:
    tokens = list(encode(before + text))
    if not final:
        for follower in FOLLOWERS:
            after = list(encode(before + text + follower))
            tokens = tokens[: len(commonprefix([tokens, after]))]  # noqa: RUF071  # not of paths
    kept = len(commonprefix([context, tokens]))  # noqa: RUF071
    cut = len(context) - kept
    if cut > max_cut or len(tokens) <= kept:
        return NOTHING
    return Seam(cut, tuple(tokens[kept:]))


def _decode(tokens: Sequence[int], piece: Callable[[int], bytes]) -> str | None:
    pieces = [piece(token) for token in tokens]
    if not all(pieces):
        return None  # a special token: no text of its own
    try:
        return b"".join(pieces).decode()
    except UnicodeDecodeError:
        return None


def _whole_characters(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()
