"""Finite automata over characters: they decide matches in linear time, and join what several keywords say of one text.

Patterns come from clients, so nothing here backtracks: a text is read once, whatever the pattern, and every automaton
is built under a limit (`TooLarge`). Patterns are trees (`pattern_tree`); what is made of an automaton, rules or a
pattern again, stands in `automaton_forms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from bough.constrained import charsets
from bough.constrained.charsets import Ranges
from bough.constrained.dfa import Dfa
from bough.constrained.pattern_tree import Chars, Choice, Meet, Node, Repeat, Row, Token

MAX_NFA = 8_000  # states of a pattern, its repeats written out
MAX_STATES = 1_500  # of a deterministic automaton
MAX_COUNTED = 4_000  # of one that counts with remainders, before equal states are joined
MAX_READ = 4_000_000  # states looked at while one text is read
DEAD = -1
S = TypeVar("S")


class TooLarge(Exception):
    """An automaton would have more states than is worth it."""


def matches(node: Node, text: str) -> bool:
    """Whether a pattern matches the whole text."""
    nfa = _nfa(node)
    states, looked = nfa.closure((nfa.start,)), 0
    for char in text:
        looked += len(states)
        if looked > MAX_READ:
            raise TooLarge
        states = nfa.after(states, ord(char))
        if not states:
            return False
    return nfa.end in states


@lru_cache(256)
def deterministic(node: Node) -> Dfa:
    """The smallest automaton of a pattern."""
    alphabet = _alphabet([node])
    return _minimal(_table(node, alphabet), alphabet)


def meet_steps(dfa: Dfa, step: int, places: int) -> Dfa:
    """Of the numbers that an automaton accepts, those whose value, times 10^places, is a multiple of `step`.

    Zeros at the end are counted and the rest of the step is kept as a remainder: a step of 1000 needs four states.
    """
    zeros = next(count for count in range(step) if step % 10 ** (count + 1))
    if math.gcd(step // 10**zeros, 10) > 1:
        zeros = 0  # what is left of the step depends on the same digits
    odd = step // 10**zeros
    letters = "0123456789-."
    ways = [{letter: to for found, to in row for letter in letters if charsets.holds(found, ord(letter))}
            for row in dfa.edges]  # fmt: skip

    def after(state: tuple[int, int, int, int], letter: int) -> tuple[int, int, int, int] | None:
        at, rest, ended, behind = (
            state  # where the automaton is, the remainder, zeros at the end, digits behind the point
        )
        target = ways[at].get(letters[letter])
        if target is None or behind > places:
            return None
        if letters[letter] == "-":
            return target, rest, ended, behind
        if letters[letter] == ".":
            return target, rest, ended, 1
        return (
            target, (rest * 10 + letter) % odd, min(ended + 1, zeros) if letter == 0 else 0, behind and behind + 1,
        )  # fmt: skip

    def accepts(state: tuple[int, int, int, int]) -> bool:
        at, rest, ended, behind = state
        missing = places - max(0, behind - 1)
        return at in dfa.accepting and rest * 10**missing % odd == 0 and ended + missing >= zeros

    table = _explore((0, 0, zeros, 0), after, accepts, len(letters), MAX_COUNTED)
    return _minimal(table, tuple(charsets.characters(letter) for letter in letters))


def signatures(base: Node, patterns: Sequence[Node]) -> set[frozenset[int]]:
    """Which of the patterns the texts of `base` match together: every set of them that some text matches exactly."""
    alphabet = _alphabet([base, *patterns])
    tables = [_reduced(_table(node, alphabet)) for node in (base, *patterns)]
    found: set[frozenset[int]] = set()

    def step(states: tuple[int, ...], letter: int) -> tuple[int, ...] | None:
        reached = _stepped(tables, states, letter)
        return None if reached[0] == DEAD else reached

    def accepts(states: tuple[int, ...]) -> bool:
        if states[0] in tables[0].accepting:
            matched = (at for at in range(len(patterns)) if states[at + 1] in tables[at + 1].accepting)
            found.add(frozenset(matched))
        return False

    _explore((0,) * len(tables), step, accepts, len(alphabet))
    return found


# ---- from a pattern: states with free steps


class _Nfa:
    """The states of one pattern; reading a set of characters, or nothing, leads from one to others."""

    def __init__(self, node: Node) -> None:
        self.reads: list[tuple[Ranges, int] | None] = []
        self.free: list[list[int]] = []
        self._known: dict[tuple[frozenset[int], int], frozenset[int]] = {}
        self.start = self._state()
        self.end = self._add(node, self.start)

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        found = set(states)
        todo = list(found)
        while todo:
            for target in self.free[todo.pop()]:
                if target not in found:
                    found.add(target)
                    todo.append(target)
        return frozenset(found)

    def after(self, states: frozenset[int], code: int) -> frozenset[int]:
        """Where a character leads. Kept, so that a long text costs a look each, not a walk."""
        key = (states, code)
        if key not in self._known:
            if len(self._known) > MAX_NFA:
                self._known.clear()
            reads = (self.reads[state] for state in states)
            self._known[key] = self.closure(
                read[1] for read in reads if read is not None and charsets.holds(read[0], code)
            )
        return self._known[key]

    def _state(self) -> int:
        if len(self.free) >= MAX_NFA:
            raise TooLarge
        self.reads.append(None)
        self.free.append([])
        return len(self.free) - 1

    def _add(self, node: Node, start: int) -> int:
        """The states of a node from `start` on; gives the one where it ends."""
        match node:
            case Chars(found):
                end, step = self._state(), self._state()
                self.free[start].append(step)
                self.reads[step] = (found, end)
                return end
            case Row(parts):
                for part in parts:
                    start = self._add(part, start)
                return start
            case Choice(options):
                end = self._state()
                for option in options:
                    self.free[self._add(option, self._fork(start))].append(end)
                return end
            case Repeat(part, least, most):
                return self._repeat(part, least, most, start)
            case Token(part):
                return self._add(part, start)
            case _:
                raise TypeError(f"{type(node).__name__} is not a regular expression by itself")

    def _repeat(self, part: Node, least: int, most: int | None, start: int) -> int:
        for _ in range(least):
            start = self._add(part, start)
        end = self._state()
        if most is None:
            loop = self._fork(start)
            self.free[loop].append(end)
            self.free[self._add(part, self._fork(loop))].append(loop)
            return end
        for _ in range(most - least):
            self.free[start].append(end)
            start = self._add(part, self._fork(start))
        self.free[start].append(end)
        return end

    def _fork(self, start: int) -> int:
        state = self._state()
        self.free[start].append(state)
        return state


@lru_cache(256)
def _nfa(node: Node) -> _Nfa:
    return _Nfa(node)


# ---- deterministic tables over one alphabet


@dataclass(frozen=True, slots=True)
class _Table:
    """By state, where each letter of the alphabet leads; state 0 begins."""

    rows: list[list[int]]
    accepting: set[int]


Alphabet = tuple[Ranges, ...]  # disjoint sets of characters that no pattern tells apart


def _alphabet(nodes: Sequence[Node]) -> Alphabet:
    """All characters, split as coarsely as the patterns allow."""
    sets: set[Ranges] = set()
    for node in nodes:
        _collect(node, sets)
    ordered = sorted(sets)
    borders = sorted({0, *(b for found in ordered for low, high in found for b in (low, high + 1))})
    members: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for low, after in zip(borders, [*borders[1:], charsets.LAST + 1], strict=True):
        if low <= charsets.LAST:
            signature = tuple(charsets.holds(found, low) for found in ordered)
            members.setdefault(signature, []).append((low, after - 1))
    letters = (charsets.ranges(pairs) for pairs in members.values())
    return tuple(letter for letter in letters if letter)


def _collect(node: Node, sets: set[Ranges]) -> None:
    match node:
        case Chars(found):
            sets.add(found)
        case Row(parts) | Choice(parts):
            for part in parts:
                _collect(part, sets)
        case Repeat(part) | Token(part):
            _collect(part, sets)
        case Meet(all_of, none_of):
            for part in (*all_of, *none_of):
                _collect(part, sets)


def _table(node: Node, alphabet: Alphabet) -> _Table:
    if isinstance(node, Meet):
        tables = [_reduced(_table(part, alphabet)) for part in (*node.all_of, *node.none_of)]
        wanted = [True] * len(node.all_of) + [False] * len(node.none_of)
        return _joined(tables, wanted, len(alphabet))
    samples = [letter[0][0] for letter in alphabet]
    if isinstance(node, Repeat) and isinstance(node.part, Chars):
        return _counter(node.part, node.least, node.most, samples)
    nfa = _nfa(node)
    return _explore(
        nfa.closure((nfa.start,)),
        lambda states, letter: nfa.after(states, samples[letter]) or None,
        lambda states: nfa.end in states,
        len(alphabet),
    )


def _counter(part: Chars, least: int, most: int | None, samples: list[int]) -> _Table:
    """Characters of one set, counted; without a most, those beyond the least are one state."""
    last = least if most is None else most
    if last >= MAX_STATES:
        raise TooLarge
    rows = []
    for count in range(last + 1):
        following = count + 1 if count < last else (count if most is None else DEAD)
        rows.append([following if charsets.holds(part.ranges, sample) else DEAD for sample in samples])
    return _Table(rows, set(range(least, last + 1)))


def _joined(tables: list[_Table], wanted: list[bool], letters: int) -> _Table:
    """The texts that the wanted tables accept and the others do not."""

    def step(states: tuple[int, ...], letter: int) -> tuple[int, ...] | None:
        reached = _stepped(tables, states, letter)
        return None if any(want and at == DEAD for want, at in zip(wanted, reached, strict=True)) else reached

    def accepts(states: tuple[int, ...]) -> bool:
        return all((at in table.accepting) == want for table, at, want in zip(tables, states, wanted, strict=True))

    return _explore((0,) * len(tables), step, accepts, letters)


def _stepped(tables: list[_Table], states: tuple[int, ...], letter: int) -> tuple[int, ...]:
    pairs = zip(tables, states, strict=True)
    return tuple(DEAD if state == DEAD else table.rows[state][letter] for table, state in pairs)


def _explore(
    start: S,
    step: Callable[[S, int], S | None],
    accepts: Callable[[S], bool],
    letters: int,
    most: int = MAX_STATES,
) -> _Table:
    numbers, todo = {start: 0}, [start]
    rows: list[list[int]] = []
    for state in todo:
        row = []
        for letter in range(letters):
            reached = step(state, letter)
            if reached is None:
                row.append(DEAD)
                continue
            if reached not in numbers:
                if len(numbers) >= most:
                    raise TooLarge
                numbers[reached] = len(numbers)
                todo.append(reached)
            row.append(numbers[reached])
        rows.append(row)
    return _Table(rows, {number for state, number in numbers.items() if accepts(state)})


def _minimal(table: _Table, alphabet: Alphabet) -> Dfa:
    """The table as an automaton of sets of characters, with nothing in it that could be left out."""
    small = _reduced(table)
    if not small.accepting:
        return Dfa(((),), frozenset())
    edges = []
    for row in small.rows:
        reached: dict[int, list[tuple[int, int]]] = {}
        for letter, target in enumerate(row):
            if target != DEAD:
                reached.setdefault(target, []).extend(alphabet[letter])
        edges.append(tuple((charsets.ranges(pairs), target) for target, pairs in reached.items()))
    return Dfa(tuple(edges), frozenset(small.accepting))


def _reduced(table: _Table) -> _Table:
    """Without states that lead nowhere, and with those joined that accept the same texts."""
    alive = _alive(table)
    if 0 not in alive:
        return _Table([[DEAD] * len(table.rows[0])], set())
    rows = [[target if target in alive else DEAD for target in row] for row in table.rows]
    block = _blocks(rows, table.accepting, alive)
    numbers, samples = {block[0]: 0}, [0]
    joined: list[list[int]] = []
    for state in samples:
        for target in rows[state]:
            if target != DEAD and block[target] not in numbers:
                numbers[block[target]] = len(numbers)
                samples.append(target)
        joined.append([DEAD if target == DEAD else numbers[block[target]] for target in rows[state]])
    return _Table(joined, {number for number, state in enumerate(samples) if state in table.accepting})


def _blocks(rows: list[list[int]], accepting: set[int], alive: set[int]) -> list[int]:
    """By state, the number of those that accept the same texts (Hopcroft's partition)."""
    letters = range(len(rows[0]))
    sources: list[dict[int, list[int]]] = [{} for _ in letters]
    for state in alive:
        for letter, target in enumerate(rows[state]):
            sources[letter].setdefault(target, []).append(state)
    blocks = [block for block in (accepting & alive, alive - accepting, {DEAD}) if block]
    of = dict.fromkeys(alive, 0) | {state: number for number, block in enumerate(blocks) for state in block}
    todo = {(number, letter) for number in range(len(blocks)) for letter in letters}
    while todo:
        splitter, letter = todo.pop()
        touched: dict[int, set[int]] = {}
        for target in blocks[splitter]:
            for state in sources[letter].get(target, ()):
                touched.setdefault(of[state], set()).add(state)
        for number, part in touched.items():
            if len(part) == len(blocks[number]):
                continue
            rest = blocks[number] - part
            blocks[number], fresh = (rest, part) if len(part) <= len(rest) else (part, rest)
            blocks.append(fresh)
            for state in fresh:
                of[state] = len(blocks) - 1
            todo |= {(len(blocks) - 1, each) for each in letters}
    return [of.get(state, DEAD) for state in range(len(rows))]


def _alive(table: _Table) -> set[int]:
    sources: dict[int, list[int]] = {}
    for state, row in enumerate(table.rows):
        for target in row:
            sources.setdefault(target, []).append(state)
    found, todo = set(table.accepting), list(table.accepting)
    while todo:
        for source in sources.get(todo.pop(), ()):
            if source not in found:
                found.add(source)
                todo.append(source)
    return found
