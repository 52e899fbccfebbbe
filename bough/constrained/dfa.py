"""A deterministic automaton over characters, as a value: made by `automata`, written out by `automaton_forms`."""

from __future__ import annotations

from dataclasses import dataclass

from bough.constrained.charsets import Ranges


@dataclass(frozen=True, slots=True)
class Dfa:
    """It begins in state 0, and every state has some way to an accepting one."""

    edges: tuple[tuple[tuple[Ranges, int], ...], ...]  # by state: disjoint sets of characters and where they lead
    accepting: frozenset[int]

    @property
    def empty(self) -> bool:
        """Whether no text is accepted."""
        return not self.accepting
