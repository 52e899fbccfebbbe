"""Finite automata over characters. They match patterns in linear time, and join what several keywords say of one text.

Clients write the patterns, so nothing backtracks, and every automaton has a limit (`TooLarge`). A pattern becomes its
positions (Glushkov's construction); a state is the set of positions that may be read next.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from bough.constrained import charsets
from bough.constrained.charsets import Ranges
from bough.constrained.pattern_tree import Chars, Choice, Meet, Node, Repeat, Row, Token

MAX_POSITIONS = 8_000  # of one pattern
MAX_LINKS = 400_000  # between its positions
MAX_STATES = 1_500  # of a deterministic automaton
MAX_READ = 4_000_000  # positions looked at while one text is read

State = tuple[frozenset[int], bool]  # positions that may be read next, and whether the text may end here
DEAD: State = (frozenset(), False)
Ends = tuple[set[int], set[int], bool]  # positions that may come first, those that may come last, and whether none may


class TooLarge(Exception):
    """An automaton would have more states than is worth it."""


@dataclass(frozen=True, slots=True)
class Dfa:
    """A deterministic automaton. It begins in state 0, and every state has some way to an accepting one."""

    edges: tuple[tuple[tuple[Ranges, int], ...], ...]  # by state: disjoint sets of characters and where they lead
    accepting: frozenset[int]


def matches(node: Node, text: str) -> bool:
    positions = _positions(node)
    state, looked = positions.start, 0
    for char in text:
        looked += len(state[0])
        if looked > MAX_READ:
            raise TooLarge
        state = positions.step(state, ord(char))
        if state == DEAD:
            return False
    return state[1]


def deterministic(node: Node) -> Dfa:
    found = _deterministic(node)
    if found is None:
        raise TooLarge
    return found


@lru_cache(256)
def _deterministic(node: Node) -> Dfa | None:
    """None instead of `TooLarge`, so that the cache holds that too."""
    all_of, none_of = (node.all_of, node.none_of) if isinstance(node, Meet) else ((node,), ())
    try:
        states, edges = _explore(all_of, none_of)
    except TooLarge:
        return None
    wanted = [True] * len(all_of) + [False] * len(none_of)
    accepting = {at for at, state in enumerate(states) if [ends for _, ends in state] == wanted}
    return _without_dead_ends(edges, accepting)


def signatures(base: Node, patterns: Sequence[Node]) -> set[frozenset[int]]:
    """Which of the patterns the texts of `base` match together: every set of them that some text matches exactly."""
    bases = base.all_of if isinstance(base, Meet) else (base,)
    states, _ = _explore(bases, patterns)
    ends = ([accepts for _, accepts in state] for state in states)
    return {
        frozenset(at for at, accepts in enumerate(each[len(bases) :]) if accepts)
        for each in ends
        if all(each[: len(bases)])
    }


class _Positions:
    def __init__(self, node: Node) -> None:
        self.reads: list[Ranges] = []
        self._follows: list[set[int]] = []
        self._links = 0
        self._known: dict[tuple[State, int], State] = {}
        first, self._last, empty = self._add(node)
        self.start: State = (frozenset(first), empty)

    def step(self, state: State, code: int) -> State:
        known = self._known.get((state, code))
        if known is None:
            read = [at for at in state[0] if charsets.holds(self.reads[at], code)]
            follows = frozenset[int]().union(*(self._follows[at] for at in read))
            known = self._known[state, code] = (follows, not self._last.isdisjoint(read))
        return known

    def _add(self, node: Node) -> Ends:
        match node:
            case Chars(found):
                if len(self.reads) == MAX_POSITIONS:
                    raise TooLarge
                self.reads.append(found)
                self._follows.append(set())
                return {len(self.reads) - 1}, {len(self.reads) - 1}, False
            case Row(parts):
                return self._row(map(self._add, parts), len(parts))
            case Choice(options):
                firsts, lasts, empties = zip(*map(self._add, options), strict=True)
                return set[int]().union(*firsts), set[int]().union(*lasts), any(empties)
            case Repeat(part, least, None):
                before = max(least, 1) - 1  # the last copy repeats itself
                copies = (self._add(part) if at < before else self._loop(part) for at in range(before + 1))
                return self._row(copies, least)
            case Repeat(part, least, int(most)):
                return self._row((self._add(part) for _ in range(most)), least)
            case Token(part):
                return self._add(part)
        raise TypeError(f"{type(node).__name__} is not a regular expression by itself")

    def _row(self, parts: Iterator[Ends], least: int) -> Ends:
        """One part after the other; the text may end after `least` of them, or any later one."""
        first: set[int] = set()
        here: set[int] = set()  # what may come last, up to the part
        last: set[int] = set()
        empty, may_be_empty = True, least == 0
        for count, (begins, ends, skipped) in enumerate(parts, 1):
            self._link(here, begins)
            first |= begins if empty else set()
            here = ends | here if skipped else ends
            empty = empty and skipped
            if count >= least:
                last |= here
        return first, last, may_be_empty or empty

    def _loop(self, part: Node) -> Ends:
        first, last, empty = self._add(part)
        self._link(last, first)
        return first, last, empty

    def _link(self, before: set[int], after: set[int]) -> None:
        self._links += len(before) * len(after)
        if self._links > MAX_LINKS:
            raise TooLarge
        for at in before:
            self._follows[at] |= after


@lru_cache(256)
def _positions(node: Node) -> _Positions:
    return _Positions(node)


Edges = list[list[tuple[Ranges, int]]]


def _explore(all_of: Sequence[Node], none_of: Sequence[Node]) -> tuple[list[tuple[State, ...]], Edges]:
    """All patterns read side by side, as long as those of `all_of` may still match: the states, and what they read."""
    patterns = [_positions(node) for node in (*all_of, *none_of)]
    start = tuple(pattern.start for pattern in patterns)
    numbers, states = {start: 0}, [start]
    edges: Edges = []
    for state in states:
        reached: dict[tuple[State, ...], list[tuple[int, int]]] = {}
        sets = {pattern.reads[at] for pattern, (nexts, _) in zip(patterns, state, strict=True) for at in nexts}
        borders = sorted({border for found in sets for low, high in found for border in (low, high + 1)})
        for low, after in pairwise(borders):  # no set tells the characters of an interval apart
            target = tuple(pattern.step(one, low) for pattern, one in zip(patterns, state, strict=True))
            if DEAD not in target[: len(all_of)]:
                reached.setdefault(target, []).append((low, after - 1))
        row = []
        for target, pairs in reached.items():
            if target not in numbers:
                if len(states) == MAX_STATES:
                    raise TooLarge
                numbers[target] = len(states)
                states.append(target)
            row.append((charsets.ranges(pairs), numbers[target]))
        edges.append(row)
    return states, edges


def _without_dead_ends(edges: Edges, accepting: set[int]) -> Dfa:
    """The automaton without the states from which no accepting one is reached."""
    sources: dict[int, list[int]] = {}
    for state, row in enumerate(edges):
        for _, target in row:
            sources.setdefault(target, []).append(state)
    alive, todo = set(accepting), list(accepting)
    while todo:
        for source in sources.get(todo.pop(), ()):
            if source not in alive:
                alive.add(source)
                todo.append(source)
    if 0 not in alive:
        return Dfa(((),), frozenset())
    numbers = {state: number for number, state in enumerate(sorted(alive))}
    rows = (tuple((found, numbers[target]) for found, target in edges[state] if target in alive) for state in numbers)
    return Dfa(tuple(rows), frozenset(numbers[state] for state in accepting))
