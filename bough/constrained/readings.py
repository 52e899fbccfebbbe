"""What makes a parser slow without end: a grammar that can be read in many ways at once, or that forces endless text.

Where one character does not decide what comes next, inside of something that repeats (`(\\w+\\s?)*`) or beside
something that is counted (`.*a{1,20}`), readings grow with the text, and the time for a mask with them.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise

from bough.constrained import charsets
from bough.constrained.charsets import Ranges
from bough.constrained.pattern_tree import Chars, Choice, Node, Reference, Repeat, Row, Token, parts_of, positions

START = "root"
NOTHING: Ranges = ()
OPEN = 50  # how often a rule that leads back to itself is taken to be open at once
MOST = 1 << 40  # characters: no text is as long


def many_readings(node: Node) -> bool:
    """Whether the readings of a regular expression may grow with the text."""
    return _Grammar({START: node}).doubtful(everywhere=_counts(node))


def grammar_has_many_readings(rules: Mapping[str, Node]) -> bool:
    """The same for a grammar. Its rules may repeat, so an undecided place anywhere counts."""
    return _Grammar(rules).doubtful(everywhere=True)


class _Grammar:
    """What each rule may begin with, whether it may be empty, and what may follow it."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._first: dict[str, Ranges] = dict.fromkeys(rules, NOTHING)
        self._empty: dict[str, bool] = dict.fromkeys(rules, False)
        self._follow: dict[str, Ranges] = dict.fromkeys(rules, NOTHING)
        self._known: dict[int, tuple[Ranges, bool]] = {}
        self._settle_beginnings()
        self._known = {}  # from here on, what is found holds for good

    def _settle_beginnings(self) -> None:
        changed = True
        while changed:
            changed = False
            for name, node in self._rules.items():
                self._known = {}
                found = self._begins(node)
                if found != (self._first[name], self._empty[name]):
                    self._first[name], self._empty[name] = found
                    changed = True

    def doubtful(self, *, everywhere: bool) -> bool:
        """Whether one character does not decide, inside a repeat or, where asked, anywhere."""
        while True:
            before = dict(self._follow)
            for name, node in self._rules.items():
                if self._doubt(node, self._follow[name], everywhere):
                    return True
            if self._follow == before:
                return False

    def _begins(self, node: Node) -> tuple[Ranges, bool]:
        """The characters that a text of this node may begin with, and whether it may be empty."""
        found = self._known.get(id(node))
        if found is None:
            found = self._known[id(node)] = self._work_out(node)
        return found

    def _work_out(self, node: Node) -> tuple[Ranges, bool]:
        match node:
            case Reference(name):
                return self._first[name], self._empty[name]
            case Repeat(part, least, _):
                first, empty = self._begins(part)
                return first, empty or least == 0
            case Choice(options):
                all_of_them = [self._begins(option) for option in options]
                return _union(first for first, _ in all_of_them), any(empty for _, empty in all_of_them)
            case Row(parts):
                firsts = []
                for part in parts:
                    first, empty = self._begins(part)
                    firsts.append(first)
                    if not empty:
                        return _union(firsts), False
                return _union(firsts), True
        assert isinstance(node, Chars)
        return node.ranges, False

    def _doubt(self, node: Node, follow: Ranges, repeated: bool) -> bool:
        """Whether one character does not decide inside this node, which `follow` may come after."""
        match node:
            case Reference(name):
                self._follow[name] = _union([self._follow[name], follow])
                return False
            case Row(parts):
                for part in reversed(parts):
                    if self._doubt(part, follow, repeated):
                        return True
                    first, empty = self._begins(part)
                    follow = _union([first, follow]) if empty else first
                return False
            case Choice(options):
                begins = [self._begins(option) for option in options]
                ways = [first for first, _ in begins]
                empties = sum(empty for _, empty in begins)
                undecided = _overlap([*ways, follow] if empties else ways) or empties > 1
                return (repeated and undecided) or any(self._doubt(option, follow, repeated) for option in options)
            case Repeat(part, least, most):
                first, empty = self._begins(part)
                undecided = least != most and _overlap([first, follow])
                again = most is None or most > 1
                if (again and empty) or (repeated and undecided):
                    return True
                return self._doubt(part, _union([first, follow]) if again else follow, repeated or again)
        return False  # a character


def _counts(node: Node) -> bool:
    """Whether it has a repeat of which one must know how often it came, and cannot tell from where it stands."""
    repeats = ((part.least, part.most) for part in parts_of(node) if isinstance(part, Repeat))
    return any(least != most and (least > 1 or (most or 0) > 1) for least, most in repeats)


def _union(sets: Iterable[Ranges]) -> Ranges:
    given = [found for found in sets if found]
    return given[0] if len(given) == 1 else charsets.ranges(pair for found in given for pair in found)


def _overlap(sets: Iterable[Ranges]) -> bool:
    pairs = sorted(pair for found in sets for pair in found)
    return any(before[1] >= after[0] for before, after in pairwise(pairs))


def forced_text(rules: Mapping[str, Node]) -> int:
    """A bound on the characters that may have to come next without a choice: what each rule still needs, at worst."""
    least = dict.fromkeys(rules, MOST)

    def needs(node: Node) -> tuple[int, int]:
        """The characters of its shortest text, and those from anywhere inside of it to its end."""
        match node:
            case Chars():
                return 1, 1
            case Reference(name):
                return least[name], least[name]
            case Row(parts):
                inner = [(0, 0), *map(needs, parts)]
                whole = min(MOST, sum(shortest for shortest, _ in inner))
                return whole, whole + max(rest for _, rest in inner)
            case Choice(options):
                inner = list(map(needs, options))
                return min(inner)[0], max(rest for _, rest in inner)
            case Repeat(part, times):
                shortest, rest = needs(part)
                return min(MOST, times * shortest), min(MOST, times * shortest) + rest
            case Token(part):
                return needs(part)
        return positions(node), positions(node)

    uses = {name: {part.name for part in parts_of(rules[name]) if isinstance(part, Reference)} for name in rules}
    users: dict[str, set[str]] = {name: set() for name in rules}
    for user, names in uses.items():
        for name in names:
            users[name].add(user)
    circles, before, order = set(rules), (-1, dict[str, int]()), list(rules)
    while before != (len(circles), least):
        before = len(circles), dict(least)
        for name in order:
            least[name] = needs(rules[name])[0]
            if uses[name].isdisjoint(circles) or users[name].isdisjoint(circles):
                circles.discard(name)
        order.reverse()  # rules mostly refer to earlier ones, or mostly to later ones
    return sum(needs(rules[name])[1] * (OPEN if name in circles else 1) for name in rules)
