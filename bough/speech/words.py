"""Where each word of a window is: the tokens' times by what the decoder attends to, and the words that tokens make."""

import string
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from bough.speech.sound import FloatArray

UNSPACED = {"zh", "ja", "th", "lo", "my", "yue"}  # languages that are written without spaces
OPENING, CLOSING = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"  # which belong to the word behind or before them
BROKEN = "\ufffd"  # a part of a character
Pieces = list[tuple[str, list[int]]]  # texts, and the places of their tokens


class Word(msgspec.Struct, frozen=True):
    """As OpenAI shows it. Times are in seconds."""

    word: str
    start: float
    end: float


def first_positions(attended: FloatArray) -> npt.NDArray[np.int64]:
    """Of each token the first position on the path of most attention through [tokens, positions], which goes on to the
    next token, the next position or both (dynamic time warping)."""
    tokens, positions = attended.shape
    cost = np.full((tokens + 1, positions + 1), np.inf, dtype=np.float32)
    cost[0, 0] = 0.0
    steps = np.empty(cost.shape, dtype=np.int8)  # 0: both, 1: the next token, 2: the next position
    for diagonal in range(2, tokens + positions + 1):  # whose cells depend on the two before alone
        i = np.arange(max(1, diagonal - positions), min(tokens, diagonal - 1) + 1)
        j = diagonal - i
        both, token, position = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        steps[i, j] = step = np.where(
            (both < token) & (both < position), 0, np.where((token < both) & (token < position), 1, 2)
        )
        cost[i, j] = np.choose(step, (both, token, position)) - attended[i - 1, j - 1].astype(np.float64)
    first, at, position = np.zeros(tokens, dtype=np.int64), tokens, positions
    while at:
        first[at - 1] = position - 1
        step = steps[at, position]
        at, position = at - int(step != 2), position - int(step != 1)
    return first


def words_of(tokens: Sequence[int], decode: Callable[[Sequence[int]], str], language: str) -> Pieces:
    """As Transformers has them: what begins with a space or is punctuation begins a word; marks stay with theirs."""
    characters, whole, done, places = Pieces(), decode(tokens), 0, list[int]()
    for place in range(len(tokens)):
        places.append(place)
        text = decode([tokens[each] for each in places])
        if BROKEN not in text or whole[done + text.index(BROKEN)] == BROKEN:
            characters.append((text, places))
            done, places = done + len(text), []
    words = Pieces()
    for text, places in characters:
        begins = text.startswith(" ") or text.strip() in string.punctuation or language in UNSPACED
        if begins or not words:
            words.append((text, places))
        else:
            words[-1] = words[-1][0] + text, words[-1][1] + places
    found, opened = Pieces(), False
    for text, places in words:
        if opened or (found and text in CLOSING and not found[-1][0].endswith(" ")):
            found[-1] = found[-1][0] + text, found[-1][1] + places
        else:
            found.append((text, places))
        opened = text.startswith(" ") and text.strip() in OPENING
    return found
