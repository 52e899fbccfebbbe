"""Sets of characters as sorted ranges of code points: what a regular expression's `[...]`, `.` and `\\w` stand for.

Surrogates are in no set: they have no UTF-8, so no token can write them.
"""

from bisect import bisect_right
from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]  # first and last, both included; ascending, neither overlapping nor touching

LAST = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
META = frozenset("\\^$.|?*+()[]{}-")


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Pairs in order and joined, without surrogates."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return _without_surrogates(joined)


def characters(text: str) -> Ranges:
    return ranges((ord(char), ord(char)) for char in text)


def complement(of: Ranges) -> Ranges:
    gaps, at = [], 0
    for low, high in of:
        if low > at:
            gaps.append((at, low - 1))
        at = high + 1
    if at <= LAST:
        gaps.append((at, LAST))
    return _without_surrogates(gaps)


def intersection(one: Ranges, other: Ranges) -> Ranges:
    return complement(ranges([*complement(one), *complement(other)]))


def difference(one: Ranges, other: Ranges) -> Ranges:
    return intersection(one, complement(other))


def holds(of: Ranges, code: int) -> bool:
    at = bisect_right(of, (code, LAST)) - 1
    return at >= 0 and of[at][0] <= code <= of[at][1]


def both_cases(of: Ranges) -> Ranges:
    """ASCII letters of either case; other scripts keep theirs, as with ECMAScript's plain flag-less classes."""
    pairs = list(of)
    for low, high in of:
        for first, last, shift in ((0x41, 0x5A, 32), (0x61, 0x7A, -32)):
            start, end = max(low, first), min(high, last)
            if start <= end:
                pairs.append((start + shift, end + shift))
    return ranges(pairs)


def class_text(of: Ranges, *, single: bool = True) -> str:
    """As every back end reads it: one class of explicit ranges; a `single` character may stand without brackets."""
    if single and len(of) == 1 and of[0][0] == of[0][1]:
        return escape(of[0][0])
    parts = (escape(low) if low == high else f"{escape(low)}-{escape(high)}" for low, high in of)
    return f"[{''.join(parts)}]"


def escape(code: int) -> str:
    char = chr(code)
    if char in META:
        return "\\" + char
    if code < 0x20 or 0x7F <= code < 0xA0:
        return f"\\x{code:02x}"
    return char


def _without_surrogates(pairs: Iterable[tuple[int, int]]) -> Ranges:
    before, behind = SURROGATES[0] - 1, SURROGATES[1] + 1
    halves = (half for low, high in pairs for half in ((low, min(high, before)), (max(low, behind), high)))
    return tuple((low, high) for low, high in halves if low <= high)


ALL = _without_surrogates([(0, LAST)])
DIGIT = characters("0123456789")
WORD = ranges([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACE = characters(" \t\n\r\f\v")
NEWLINE = characters("\n\r")
