"""Finite automata over characters: they decide matches in linear time, and join what several keywords say of one text.

Patterns come from clients, so nothing here backtracks: a text is read once, whatever the pattern, and every automaton
is built under a limit (`TooLarge`). Patterns are trees (`pattern_tree`); what is made of an automaton, rules or a
pattern again, stands in `automaton_forms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from bough.constrained import charsets
from bough.constrained.dfa import Dfa
from bough.constrained.nfa import TooLarge, nfa_of
from bough.constrained.pattern_tree import Node
from bough.constrained.state_tables import DEAD, alphabet_of, explore, minimal, reduced, stepped, table_of

MAX_COUNTED = 4_000  # states of an automaton that counts with remainders, before equal states are joined
MAX_READ = 4_000_000  # states looked at while one text is read

__all__ = ["TooLarge", "deterministic", "matches", "meet_steps", "signatures"]


def matches(node: Node, text: str) -> bool:
    """Whether a pattern matches the whole text."""
    nfa = nfa_of(node)
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
    alphabet = alphabet_of([node])
    return minimal(table_of(node, alphabet), alphabet)


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

    table = explore((0, 0, zeros, 0), after, accepts, len(letters), MAX_COUNTED)
    return minimal(table, tuple(charsets.characters(letter) for letter in letters))


def signatures(base: Node, patterns: Sequence[Node]) -> set[frozenset[int]]:
    """Which of the patterns the texts of `base` match together: every set of them that some text matches exactly."""
    alphabet = alphabet_of([base, *patterns])
    tables = [reduced(table_of(node, alphabet)) for node in (base, *patterns)]
    found: set[frozenset[int]] = set()

    def step(states: tuple[int, ...], letter: int) -> tuple[int, ...] | None:
        reached = stepped(tables, states, letter)
        return None if reached[0] == DEAD else reached

    def accepts(states: tuple[int, ...]) -> bool:
        if states[0] in tables[0].accepting:
            matched = (at for at in range(len(patterns)) if states[at + 1] in tables[at + 1].accepting)
            found.add(frozenset(matched))
        return False

    explore((0,) * len(tables), step, accepts, len(alphabet))
    return found
