"""Puts what stands for media in the place of their placeholders, on token ids.

A prompt has one placeholder for each item, or holds the whole text of an item already: both are found.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from bough.core.errors import RequestError
from bough.core.media import MediaItem, MediaPrompt, media_ids
from bough.core.plan import IntArray
from bough.multimodal.families import Prepared
from bough.multimodal.sources import FIELDS, PLURALS
from bough.tokenizer.tokenizer import Tokenizer


def expand(ids: IntArray, items: Sequence[Prepared], tokenizer: Tokenizer) -> tuple[IntArray, MediaPrompt]:
    """The whole prompt. The items of each kind are in the order of the prompt."""
    waiting = {kind: deque(item for item in items if item.kind == kind) for kind in PLURALS}
    places = {item.place: item.kind for item in items}
    counts = Counter(item.kind for item in items)
    lone = {kind for place, kind in places.items() if (ids == place).sum() == counts[kind]}
    starts = np.isin(ids, [*places, *(int(item.ids[0]) for item in items)])

    def is_whole(item: Prepared, at: int) -> bool:
        """Whether its text stands there. Placeholders of several items, side by side, may look like it."""
        is_text = item.kind not in lone or (item.ids == item.place).sum() == 1
        return is_text and np.array_equal(item.ids, ids[at : at + len(item.ids)])

    out: list[int] = []
    found: list[tuple[Prepared, int]] = []  # with the place of its first token
    cursor, after = 0, ""
    for at in np.flatnonzero(starts).tolist():
        if at < cursor:
            continue
        heads = (queue[0] for queue in waiting.values() if queue)
        whole = next((item for item in heads if is_whole(item, at)), None)
        kind = places.get(int(ids[at])) if whole is None else whole.kind
        if kind is None:
            continue  # a token that begins items, and stands here for itself
        if not waiting[kind]:
            raise _mismatch(ids, items)
        item = waiting[kind].popleft()
        number = sum(other.kind == kind for other, _ in found)
        before, behind = ("", "") if whole is not None else (item.before.format(number), item.after)
        out += _joined(after, ids[cursor:at].tolist(), before, tokenizer)
        found.append((item, len(out)))
        out += item.ids.tolist()
        cursor, after = at + (1 if whole is None else len(item.ids)), behind
    if any(waiting.values()):
        raise _mismatch(ids, items)
    expanded = np.array(out + _joined(after, ids[cursor:].tolist(), "", tokenizer), dtype=np.int32)
    placed = [_place(item, first, expanded) for item, first in found]
    grids = [(item, each.spans) for (item, _), each in zip(found, placed, strict=True)]
    positions, delta = rope_positions(len(expanded), grids)
    return expanded, MediaPrompt(tuple(placed), positions, delta)


def _joined(after: str, text: list[int], before: str, tokenizer: Tokenizer) -> list[int]:
    """The text between two items, with the line breaks that the items bring: tokenizers have tokens for several."""

    def is_break(token: int) -> bool:
        return not tokenizer.token_text(token).strip("\n")

    if after and text and is_break(text[0]):
        after, text = after + tokenizer.token_text(text[0]), text[1:]
    if before and text and is_break(text[-1]):
        before, text = tokenizer.token_text(text[-1]) + before, text[:-1]
    breaks = [after, before] if text else [after + before, ""]
    first, last = (tokenizer.encode(each, add_special_tokens=False) if each else [] for each in breaks)
    return first + text + last


def _place(item: Prepared, first: int, ids: IntArray) -> MediaItem:
    """Where the rows go; `ids` gets their numbers."""
    rows = np.flatnonzero(item.ids == item.row) + first
    ids[rows] = media_ids(item.digest, len(rows))
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    spans = tuple((int(run[0]), len(run)) for run in runs)
    return MediaItem(item.kind, item.digest, spans, item.features, item.file)


def rope_positions(
    length: int, items: Sequence[tuple[Prepared, tuple[tuple[int, int], ...]]]
) -> tuple[bytes | None, int]:
    """Time, height and width of each token, as `get_rope_index` counts them: a picture's rows count from where it
    begins, and text goes on behind its longer side."""
    if all(prepared.grid is None for prepared, _ in items):
        return None, 0
    positions = np.empty((3, length), dtype=np.int32)
    cursor = at = 0
    for prepared, spans in items:
        time, height, width = prepared.grid or (1, 1, 1)
        grid: Any = np.indices((time, height, width)).reshape(3, -1)
        grid[0] = grid[0].astype(np.float32) * np.float32(prepared.interval)
        for start, count in spans:
            positions[:, cursor:start] = np.arange(at, at + start - cursor)
            at += start - cursor
            positions[:, start : start + count] = grid + at
            at += max(height, width)
            cursor = start + count
    positions[:, cursor:] = np.arange(at, at + length - cursor)
    return positions.tobytes(), int(positions.max()) + 1 - length


def _mismatch(ids: IntArray, items: Sequence[Prepared]) -> RequestError:
    given = Counter(item.kind for item in items)
    places = {item.kind: item.place for item in items}
    rows = {kind: sum(int((item.ids == item.row).sum()) for item in items if item.kind == kind) for kind in places}
    there = [
        f"{count} {PLURALS[kind]}, {(ids == places[kind]).sum()} placeholders, {rows[kind]} when expanded"
        for kind, count in given.items()
    ]
    names = ", ".join(f"token {token} for {kind}" for kind, token in places.items())
    return RequestError(
        f"The prompt does not fit its media ({'; '.join(there)}). Write one placeholder ({names}) where each item "
        "belongs, or all tokens that stand for it.",
        field=FIELDS[items[0].kind],
    )
