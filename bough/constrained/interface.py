"""The seam between structured output and the engine.

A request carries a `GrammarSpec`. The scheduler hands it to a `GrammarCompiler` and polls the `Ticket`. All requests
with the same spec share the `Compiled` grammar; each has a `Matcher` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag", "choice"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """What a request asks for; it crosses processes and is the cache's key, so its text is canonical (`spec.py`)."""

    kind: GrammarKind
    text: str  # the schema's JSON, the regex, the grammar, the tag's JSON, or the choices as a JSON list
    strict: bool = True
    any_whitespace: bool = False


class Matcher(Protocol):
    """Where one request stands in its grammar. It has one owner and is not safe to share between threads."""

    def accept(self, token: int) -> bool:
        """Steps over a token; False, with the state unchanged, when it is not allowed here."""

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Writes what is allowed next into [ceil(vocabulary / 32)] words: bit i % 32 of word i // 32 is token i."""

    def rollback(self, tokens: int) -> None:
        """Takes the last accepted tokens back, a stop token too."""

    @property
    def finished(self) -> bool:
        """A stop token has been accepted; nothing may follow."""

    @property
    def can_end(self) -> bool:
        """The text so far is whole: a stop token is allowed here."""

    def forced(self) -> bytes:
        """The bytes that must come next; empty where there is a choice, or where the text may end."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One grammar over one vocabulary, shared by every request that asks for it."""

    warnings: tuple[str, ...]  # what is not enforced, by path; for a strict spec only unknown keywords
    matcher: Callable[[], Matcher]


class Ticket(Protocol):
    """A compile that was asked for. Polling costs nothing; the scheduler does so on every turn of its loop."""

    @property
    def done(self) -> bool: ...

    def result(self) -> Compiled:
        """The grammar, or the `RequestError` that its request is refused with. Only when `done`."""

    def cancel(self) -> None:
        """The request no longer waits; a compile that serves no other request may be dropped."""


class GrammarCompiler(Protocol):
    def request(self, spec: GrammarSpec) -> Ticket: ...

    def close(self) -> None: ...
