"""Deterministic automata as tables over one alphabet: made from patterns, joined, and made small.

An alphabet is all characters, split into the few sets that the patterns in question tell apart; tables over the same
alphabet can be walked side by side. What is asked of them stands in `automata`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bough.constrained import charsets
from bough.constrained.charsets import Ranges
from bough.constrained.dfa import Dfa
from bough.constrained.nfa import TooLarge, nfa_of
from bough.constrained.pattern_tree import Chars, Choice, Meet, Node, Repeat, Row, Token

MAX_STATES = 1_500  # of a deterministic automaton
DEAD = -1
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Table:
    """By state, where each letter of the alphabet leads; state 0 begins."""

    rows: list[list[int]]
    accepting: set[int]


Alphabet = tuple[Ranges, ...]  # disjoint sets of characters that no pattern tells apart


def alphabet_of(nodes: Sequence[Node]) -> Alphabet:
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


def table_of(node: Node, alphabet: Alphabet) -> Table:
    if isinstance(node, Meet):
        tables = [reduced(table_of(part, alphabet)) for part in (*node.all_of, *node.none_of)]
        wanted = [True] * len(node.all_of) + [False] * len(node.none_of)
        return _joined(tables, wanted, len(alphabet))
    samples = [letter[0][0] for letter in alphabet]
    if isinstance(node, Repeat) and isinstance(node.part, Chars):
        return _counter(node.part, node.least, node.most, samples)
    nfa = nfa_of(node)
    return explore(
        nfa.closure((nfa.start,)),
        lambda states, letter: nfa.after(states, samples[letter]) or None,
        lambda states: nfa.end in states,
        len(alphabet),
    )


def _counter(part: Chars, least: int, most: int | None, samples: list[int]) -> Table:
    """Characters of one set, counted; without a most, those beyond the least are one state."""
    last = least if most is None else most
    if last >= MAX_STATES:
        raise TooLarge
    rows = []
    for count in range(last + 1):
        following = count + 1 if count < last else (count if most is None else DEAD)
        rows.append([following if charsets.holds(part.ranges, sample) else DEAD for sample in samples])
    return Table(rows, set(range(least, last + 1)))


def _joined(tables: list[Table], wanted: list[bool], letters: int) -> Table:
    """The texts that the wanted tables accept and the others do not."""

    def step(states: tuple[int, ...], letter: int) -> tuple[int, ...] | None:
        reached = stepped(tables, states, letter)
        return None if any(want and at == DEAD for want, at in zip(wanted, reached, strict=True)) else reached

    def accepts(states: tuple[int, ...]) -> bool:
        return all((at in table.accepting) == want for table, at, want in zip(tables, states, wanted, strict=True))

    return explore((0,) * len(tables), step, accepts, letters)


def stepped(tables: list[Table], states: tuple[int, ...], letter: int) -> tuple[int, ...]:
    pairs = zip(tables, states, strict=True)
    return tuple(DEAD if state == DEAD else table.rows[state][letter] for table, state in pairs)


def explore(
    start: S,
    step: Callable[[S, int], S | None],
    accepts: Callable[[S], bool],
    letters: int,
    most: int = MAX_STATES,
) -> Table:
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
    return Table(rows, {number for state, number in numbers.items() if accepts(state)})


def minimal(table: Table, alphabet: Alphabet) -> Dfa:
    """The table as an automaton of sets of characters, with nothing in it that could be left out."""
    small = reduced(table)
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


def reduced(table: Table) -> Table:
    """Without states that lead nowhere, and with those joined that accept the same texts."""
    alive = _alive(table)
    if 0 not in alive:
        return Table([[DEAD] * len(table.rows[0])], set())
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
    return Table(joined, {number for number, state in enumerate(samples) if state in table.accepting})


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


def _alive(table: Table) -> set[int]:
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
