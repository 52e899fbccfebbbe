"""The seam between structured output and the engine.

A request carries a `GrammarSpec`. The scheduler hands it to a compiler and polls the `Ticket`. All requests with the
same spec share the `Compiled` grammar; each has a `Matcher` of its own.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from bough.constrained.vocabulary import allow_only
from bough.core.errors import RequestError
from bough.core.sampling_params import SamplingParams

GrammarKind = Literal["json_schema", "regex", "ebnf", "structural_tag", "choice"]


class GrammarSpec(msgspec.Struct, frozen=True):
    """What a request asks for; it crosses processes and is the cache's key, so its text is canonical."""

    kind: GrammarKind
    text: str  # the schema's JSON, the regex, the grammar, the tag's JSON, or the choices as a JSON list
    strict: bool = True
    any_whitespace: bool = False


class Prepared(msgspec.Struct, frozen=True):
    """A spec as a back end gets it; it crosses processes. For llguidance it is a grammar in its own language (kind
    `ebnf`), for xgrammar a `regex`, a grammar (`ebnf`) or a `structural_tag`, for outlines-core a `regex`."""

    spec: GrammarSpec
    backend: str  # that follows it
    warnings: tuple[str, ...] = ()
    light: bool = False
    jumps: bool = True  # text without a choice is never so long that listing it would hold up or fill the engine


class Matcher(ABC):
    """Where one request stands in its grammar. It has one owner and is not safe to share between threads. It keeps the
    end of a text itself, because the libraries know one stop token at most; they are asked up to there."""

    def __init__(self, stops: tuple[int, ...]) -> None:
        self._stops = stops
        self.jumps = True  # see `Prepared`
        self.finished = False  # a stop token has been accepted; nothing may follow

    def accept(self, token: int) -> bool:
        """Steps over a token; False, with the state unchanged, when it is not allowed here."""
        if self.finished:
            return False
        if token in self._stops:
            self.finished = self.can_end
            return self.finished
        return self._step(token)

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        """Writes what is allowed next into [ceil(vocabulary / 32)] words: bit i % 32 of word i // 32 is token i."""
        if self.finished:
            allow_only(self._stops, mask)
        else:
            self._fill(mask)

    def rollback(self, tokens: int) -> None:
        """Takes the last accepted tokens back, a stop token too."""
        if tokens and self.finished:
            self.finished = False
            tokens -= 1
        if tokens:
            self._step_back(tokens)

    def forced(self) -> bytes:
        """The bytes that must come next; empty where there is a choice, or where the text may end."""
        return self._forced() if self.jumps and not self.finished else b""

    @property
    @abstractmethod
    def can_end(self) -> bool:
        """The text so far is whole: a stop token is allowed here."""

    @abstractmethod
    def _forced(self) -> bytes: ...

    @abstractmethod
    def _step(self, token: int) -> bool: ...

    @abstractmethod
    def _step_back(self, tokens: int) -> None: ...

    @abstractmethod
    def _fill(self, mask: npt.NDArray[np.int32]) -> None: ...


@dataclass(slots=True)
class Compiled:
    """One grammar over one vocabulary, shared by every request that asks for it."""

    warnings: tuple[str, ...]  # what is not enforced, by path; for a strict spec only unknown keywords
    make: Callable[[], Matcher]
    jumps: bool  # see `Prepared`
    tried: bool = False  # some masks were worked out, and quickly

    def matcher(self) -> Matcher:
        made = self.make()
        made.jumps = self.jumps
        return made


class Ticket(Protocol):
    """A compile that was asked for. Polling costs nothing; the scheduler does so on every turn of its loop."""

    @property
    def done(self) -> bool: ...

    def result(self) -> Compiled:
        """The grammar, or the `RequestError` that its request is refused with. Only when `done`."""

    def cancel(self) -> None:
        """The request no longer waits; a compile that serves no other request may be dropped."""


def spec_of(sampling: SamplingParams, any_whitespace: bool) -> GrammarSpec:
    """What a request's grammar field asks for: one text for each meaning, so that the cache finds it again. `prepare`
    decides whether a back end can enforce it."""
    if sampling.choices:
        return GrammarSpec("choice", json.dumps(list(dict.fromkeys(sampling.choices)), ensure_ascii=False))
    if sampling.regex:
        return GrammarSpec("regex", sampling.regex)
    if sampling.ebnf:
        return GrammarSpec("ebnf", sampling.ebnf)
    strict = sampling.grammar_strict
    if sampling.structural_tag:
        tag = _canonical(sampling.structural_tag, "structural_tag", (dict,))
        return GrammarSpec("structural_tag", tag, strict, any_whitespace)
    schema = _canonical(sampling.json_schema or "", "json_schema", (dict, bool))
    return GrammarSpec("json_schema", schema, strict, any_whitespace)


@lru_cache(maxsize=16)
def _canonical(text: str, field: str, allowed: tuple[type, ...]) -> str:
    """Keys keep their order, which is that of the answer's properties. All prompts of a call have the same text."""
    try:
        value = json.loads(text)
        written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is not valid JSON: {error}.", field=field) from None
    if not isinstance(value, allowed):
        raise RequestError(f"{field} must be a JSON object, not {type(value).__name__}.", field=field)
    return written
