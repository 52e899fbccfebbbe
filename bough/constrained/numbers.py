"""Numbers as patterns of their digits: ranges of whole and of decimal numbers, and multiples of a step.

Most clients parse decimals to 64-bit floats. So decimals have no more digits than a float tells apart (15): no text is
rounded onto a bound that it must not reach. Texts in a range have no exponent.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

from bough.constrained import charsets
from bough.constrained.automata import TooLarge
from bough.constrained.pattern_tree import EMPTY, Chars, JsonNumber, Node, Row, choice, literal, repeat

WHOLE_DIGITS = 19  # of whole numbers below a higher bound: 64 bits
FLOAT_DIGITS = 15  # that a 64-bit float tells apart
MAX_DIGITS = 60  # of any number but a bound itself
MAX_STEP = 1024
MAX_PLACES = 8
MOST_WHOLE, MOST_DECIMAL = 10**15, 10**12  # multiples beyond are left out: the library and floats would round them
MANY = 10**9
DIGIT = Chars(charsets.DIGIT)
FIRST = Chars(charsets.characters("123456789"))
MINUS, POINT, ZERO = literal("-"), literal("."), literal("0")
INTEGER = Row((repeat(MINUS, 0, 1), choice([ZERO, Row((FIRST, repeat(DIGIT, 0, None)))])))
SIGN = repeat(Chars(charsets.characters("+-")), 0, 1)
EXPONENT = Row((Chars(charsets.characters("eE")), SIGN, repeat(DIGIT, 1, 2)))

Number = int | float


@dataclass(frozen=True, slots=True)
class Range:
    low: Number | None = None
    high: Number | None = None
    above: bool = False  # the low bound is excluded
    below: bool = False  # the high bound is excluded

    @property
    def open(self) -> bool:
        return self.low is None and self.high is None


def whole(found: Range) -> Node | None:
    """The whole numbers of a range with inclusive bounds; None where there are none."""
    if found.open:
        return INTEGER
    low, high = found.low, found.high
    options = []
    if high is None or high >= 0:
        options.append(_wholes(max(0, int(low or 0)), None if high is None else int(high)))
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -int(high)
        below = _wholes(least, None if low is None else -int(low))
        options.append(None if below is None else Row((MINUS, below)))
    return _either(options)


def decimal(found: Range) -> Node | None:
    """The decimal numbers of a range; None where none can be told from its bounds."""
    if found.open:
        return Row((INTEGER, repeat(Row((POINT, repeat(DIGIT, 1, None))), 0, 1), repeat(EXPONENT, 0, 1)))
    low, high = _exact(found.low), _exact(found.high)
    options = []
    if high is None or high >= 0:
        inside = low is not None and low >= 0
        options.append(_decimals(low if inside else None, found.above and inside, high, found.below))
    if low is None or low < 0:
        inside = high is not None and high < 0
        below = _decimals(-high if inside and high is not None else Decimal(0), found.below or not inside,
                          None if low is None else -low, found.above)  # fmt: skip
        options.append(None if below is None else Row((MINUS, below)))
    return _either(options)


def multiples(found: Range, step: Fraction, only_whole: bool) -> JsonNumber | None:
    """The multiples of a step in a range, for llguidance, which checks them; None where there are none, `TooLarge`
    where the step has too many digits. The library mistakes excluded bounds, so bounds are given as multiples,
    included."""
    places = 0 if only_whole else next((k for k in range(MAX_PLACES) if 10**k % step.denominator == 0), MAX_PLACES)
    modulus, left = divmod(step.numerator * 10**places, step.denominator)
    if modulus > MAX_STEP or left:
        raise TooLarge
    most = MOST_WHOLE if only_whole else MOST_DECIMAL
    low, high = (None if bound is None else Fraction(str(bound)) / step for bound in (found.low, found.high))
    first = None if low is None else math.floor(low) + 1 if found.above else math.ceil(low)
    last = None if high is None else math.ceil(high) - 1 if found.below else math.floor(high)
    if first is not None and last is not None and first > last:
        return None
    if (first or 0) * step > most or (last or 0) * step < -most:
        raise TooLarge
    schema = {"type": "integer" if only_whole else "number", "multipleOf": _number(step)}
    if first is not None or not only_whole:
        schema["minimum"] = _number(max(-most // step if first is None else first, -most // step) * step)
    if last is not None or not only_whole:
        schema["maximum"] = _number(min(most // step if last is None else last, most // step) * step)
    return JsonNumber(json.dumps(schema))


def _number(value: Fraction) -> Number:
    return int(value) if value.denominator == 1 else float(value)


# ---- whole numbers, not negative


def _wholes(low: int, high: int | None) -> Node | None:
    first = str(low)
    if len(first) > MAX_DIGITS and (high is None or low <= high):
        return literal(first)
    if high is None:
        return _either([_Tail(first).exactly(len(first)), Row((FIRST, repeat(DIGIT, len(first), None)))])
    most = 10 ** max(WHOLE_DIGITS, len(first) + 1) - 1
    last = str(min(high, most))
    if low > int(last):
        return None
    if len(first) == len(last):
        return _Tail(first, high=last).exactly(len(first))
    options = [_Tail(first).exactly(len(first))]
    if len(last) - len(first) > 1:
        options.append(Row((FIRST, repeat(DIGIT, len(first), len(last) - 2))))
    options.append(_Tail("1", high=last).exactly(len(last)))
    return _either(options)


# ---- decimal numbers, not negative


def _exact(bound: Number | None) -> Decimal | None:
    """A bound as it is written; a large float is whole, and compared as such with the whole numbers beside it."""
    if bound is None:
        return None
    return Decimal(int(bound)) if abs(bound) >= 2**53 else Decimal(repr(bound))


def _decimals(low: Decimal | None, above: bool, high: Decimal | None, below: bool) -> Node | None:
    """From low to high; an excluded bound is itself left out."""
    first, least = _split(low or Decimal(0))
    last, most = (None, "") if high is None else _split(high)
    if first == last:
        options = [_at(first, least, above, most, below)]
    else:
        options = [_at(first, least, above, None, False), _between(first + 1, (MANY if last is None else last) - 1)]
        options.append(_wholes(max(first + 1, MANY), None) if last is None else _at(last, "", False, most, below))
    for bound, excluded in ((low, above), (high, below)):
        if bound is not None and not excluded and len(_split(bound)[1]) > _places(*_split(bound)):
            options.append(literal(format(bound, "f")))  # a bound of more digits than the others may have
    return _either(options)


def _split(value: Decimal) -> tuple[int, str]:
    text = format(value, "f")
    before, _, behind = text.partition(".")
    return int(before), behind.rstrip("0")


def _places(before: int, behind: str) -> int:
    """How many digits may follow the point near a bound."""
    if before:
        return max(0, FLOAT_DIGITS - len(str(before)))
    return min(MAX_DIGITS, FLOAT_DIGITS + len(behind) - len(behind.lstrip("0")))


def _between(first: int, last: int) -> Node | None:
    """Whole parts that are no bound's, with any fraction; large ones have room for few digits behind the point."""
    if first < MANY < last:
        return _either([_between(first, MANY - 1), _between(MANY, last)])
    found = _wholes(first, last) if first <= last else None
    places = FLOAT_DIGITS - len(str(last))
    fraction = repeat(Row((POINT, repeat(DIGIT, 1, places))), 0, 1) if places > 0 else EMPTY
    return None if found is None else Row((found, fraction))


def _at(before: int, low: str, above: bool, high: str | None, below: bool) -> Node | None:
    places = _places(before, high or "")
    tail = _Tail(low, above, high, below)
    options: list[Node | None] = [EMPTY if tail.ends else None]
    if places > 0:
        digits = tail.pattern(places)
        options.append(None if digits is None else Row((POINT, digits)))
    rest = _either(options)
    return None if rest is None else Row((literal(str(before)), rest))


@dataclass(frozen=True, slots=True)
class _Tail:
    """Digits still to come, behind the point or of a whole number, and what they must not fall short of or pass."""

    low: str | None  # None: anything is high enough
    above: bool = False
    high: str | None = None  # None: anything is low enough
    below: bool = False

    @property
    def ends(self) -> bool:
        high_enough = self.low is None or (not self.low and not self.above)
        return high_enough and (self.high is None or bool(self.high) or not self.below)

    def pattern(self, places: int) -> Node | None:
        """At least one digit, and at most so many."""
        if places == 0:
            return None
        if self.low is None and self.high is None:
            return repeat(DIGIT, 1, places)
        return self._next(lambda after: _either([EMPTY if after.ends else None, after.pattern(places - 1)]))

    def exactly(self, places: int) -> Node | None:
        """So many digits."""
        if self.low is None and self.high is None:
            return repeat(DIGIT, places, places)
        return self._next(lambda after: after.exactly(places - 1)) if places else EMPTY

    def _next(self, rest_of: Callable[[_Tail], Node | None]) -> Node | None:
        """One digit, and what may follow it."""
        groups: dict[_Tail, list[int]] = {}
        for digit in range(10):
            after = self._after(digit)
            if after is not None:
                groups.setdefault(after, []).append(digit)
        options = []
        for after, digits in groups.items():
            rest = rest_of(after)
            options.append(
                None if rest is None else Row((Chars(charsets.ranges([(0x30 + digits[0], 0x30 + digits[-1])])), rest))
            )
        return _either(options)

    def _after(self, digit: int) -> _Tail | None:
        low, high = self.low, self.high
        if low is not None:
            bound = int(low[:1] or 0)
            if digit < bound:
                return None
            low = None if digit > bound or (not low[1:].strip("0") and not self.above) else low[1:]
        if high is not None:
            bound = int(high[:1] or 0)
            if digit > bound or (not high and self.below):
                return None
            high = None if digit < bound else high[1:]
        return _Tail(low, self.above and low is not None, high, self.below and high is not None)


def _either(options: Sequence[Node | None]) -> Node | None:
    known = [option for option in options if option is not None]
    return choice(known) if known else None
