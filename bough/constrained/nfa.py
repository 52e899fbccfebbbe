"""The states of a pattern, where reading nothing may lead on as well: what texts are matched with, one look for each
character, and what deterministic automata are made of (`state_tables`). Limited in size, because patterns are clients'.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from bough.constrained import charsets
from bough.constrained.charsets import Ranges
from bough.constrained.pattern_tree import Chars, Choice, Node, Repeat, Row, Token

MAX_NFA = 8_000  # states of a pattern, its repeats written out


class TooLarge(Exception):
    """An automaton would have more states than is worth it."""


class Nfa:
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
def nfa_of(node: Node) -> Nfa:
    return Nfa(node)
