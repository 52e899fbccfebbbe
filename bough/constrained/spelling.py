"""Forced text as tokens, as the model's own tokenizer would have made them.

In front, the text may join with the token that stands last. Behind, its last tokens may join with what is sampled next:
they are held back, and the model samples them itself under the grammar's mask.
"""

from collections.abc import Callable, Sequence
from os.path import commonprefix

FOLLOWERS = ("a", "Z", "7", " ", '"', "}", "]", ",", ":", "-", ".", "\n", "<", "\\", "é")  # what a text may go on with
LONGEST = 2048  # characters that are spelt at once, sixteen times, while all requests of the engine wait
Encode = Callable[[str], Sequence[int]]
Piece = Callable[[int], bytes]


def spell(encode: Encode, piece: Piece, last: int | None, forced: bytes, whole: bool) -> tuple[int, ...]:
    """The tokens of the last token's text and of what must follow it, of the beginning of a long text; no more than the
    last where the tokenizer cannot say. `whole`: the text ends here, so nothing is held back."""
    text = _whole_characters(forced)
    if last is None:
        return _certain_tokens(encode, piece, text, whole)
    before = _whole_characters(piece(last))
    if before.encode() == piece(last) != b"" and list(encode(before)) == [last]:
        return _certain_tokens(encode, piece, before + text, whole) or (last,)
    # It is special or part of a character, or the model spelt it in a way of its own: it stays.
    return (last, *_certain_tokens(encode, piece, text, whole))


def _certain_tokens(encode: Encode, piece: Piece, text: str, whole: bool) -> tuple[int, ...]:
    followers: Sequence[str] = () if whole else FOLLOWERS
    if len(text) > LONGEST:
        text, followers = text[:LONGEST], (text[LONGEST : 2 * LONGEST],)
    tokens = list(encode(text))
    for follower in followers:
        tokens = tokens[: len(commonprefix([tokens, list(encode(text + follower))]))]  # noqa: RUF071  # not of paths
    written = b"".join(map(piece, tokens))
    return tuple(tokens) if text.encode().startswith(written) else ()  # else it adds blanks or special tokens


def _whole_characters(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        return data[: error.start].decode()
