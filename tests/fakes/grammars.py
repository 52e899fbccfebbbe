"""Grammars over the fake executor's tokens: each position of a text names the bytes that may stand there.

Tokens 0 to 63 write one byte each, 64 to 88 two bytes below 5, as a tokenizer merges them; 89 ends a text and the rest
write nothing. `oracle` says what a request must get, whatever happens around it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bough.constrained.interface import GrammarSpec
from bough.core.errors import RequestError
from bough.core.plan import mask_words
from tests.fakes.executor import VOCAB, next_token

EOS = 89
MERGED = {(a, b): 64 + 5 * a + b for a in range(5) for b in range(5)}
PIECES = [bytes([i]) for i in range(64)] + [bytes(pair) for pair in MERGED] + [b""] * (VOCAB - 89)
Places = list[list[int]]  # for each position of the text, the bytes that may stand there; none: a dead end


def grammar(places: Places) -> str:
    """As the `regex` of a request."""
    return json.dumps(places)


def spell(text: bytes, *, whole: bool = False) -> list[int]:
    """Merges pairs from the left; unless the text is whole, a last byte that might merge with the next is left out."""
    tokens: list[int] = []
    while text:
        merged = MERGED.get((text[0], text[1])) if len(text) > 1 else None
        if merged is None and len(text) == 1 and text[0] < 5 and not whole:
            break
        tokens.append(text[0] if merged is None else merged)
        text = text[len(PIECES[tokens[-1]]) :]
    return tokens


class FakeMatcher:
    def __init__(self, places: Places) -> None:
        self.places = places
        self.taken: list[int] = []

    @property
    def at(self) -> int:
        return sum(len(PIECES[token]) for token in self.taken)

    @property
    def finished(self) -> bool:
        return self.taken[-1:] == [EOS]

    @property
    def can_end(self) -> bool:
        return self.at == len(self.places) and not self.finished

    def allowed(self) -> list[int]:
        if self.finished:
            return []
        rest = self.places[self.at : self.at + 2]
        if not rest:
            return [EOS]
        pairs = [MERGED[a, b] for a in rest[0] for b in rest[-1] if len(rest) == 2 and a < 5 and b < 5]
        return [*rest[0], *pairs]

    def accept(self, token: int) -> bool:
        if token not in self.allowed():
            return False
        self.taken.append(token)
        return True

    def rollback(self, tokens: int) -> None:
        assert tokens <= len(self.taken)
        del self.taken[len(self.taken) - tokens :]

    def fill(self, mask: np.ndarray) -> None:
        bits = np.zeros(32 * len(mask), dtype=np.uint8)
        bits[self.allowed()] = 1
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def forced(self) -> bytes:
        text = bytearray()
        for place in self.places[self.at :]:
            if len(place) != 1:
                break
            text += bytes(place)
        return bytes(text)


@dataclass
class FakeCompiled:
    places: Places
    warnings: tuple[str, ...] = ()
    tried: bool = True  # so that steps do not depend on how busy the machine is

    def matcher(self) -> FakeMatcher:
        return FakeMatcher(self.places)


@dataclass
class FakeTicket:
    """Done after it was looked at so many times."""

    spec: GrammarSpec
    looks: int
    cancelled: bool = False

    @property
    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def result(self) -> FakeCompiled:
        places = json.loads(self.spec.text)
        if self.spec.kind == "json_schema":
            places = places["const"]
        if not isinstance(places, list):
            raise RequestError("The grammar takes too long to compile.", field="regex")
        return FakeCompiled(places, () if self.spec.strict else ("not enforced",))

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class FakeGrammars:
    looks: int = 0  # before a grammar is compiled
    tickets: list[FakeTicket] = field(default_factory=list)

    def request(self, spec: GrammarSpec) -> FakeTicket:
        self.tickets.append(FakeTicket(spec, self.looks))
        return self.tickets[-1]

    def spell(self, last: int | None, forced: bytes, *, whole: bool = False) -> Sequence[int]:
        return spell((b"" if last is None else PIECES[last]) + forced, whole=whole)

    def close(self) -> None: ...


def oracle(
    prompt: list[int], places: Places, max_new: int, *, jumps: bool = True, logprobs: bool = False
) -> list[int] | None:
    """What the request generates; None where the grammar has no way on."""
    matcher, output = FakeMatcher(places), list[int]()
    first = spell(matcher.forced())
    if jumps and not logprobs and len(first) < max_new:
        assert all(map(matcher.accept, first))
        output += first
    while len(output) < max_new:
        mask = np.zeros(mask_words(VOCAB), dtype=np.int32)
        matcher.fill(mask)
        token = next_token(np.array(prompt + output, dtype=np.int32), mask)
        if token < 0:
            return None
        assert matcher.accept(token)
        output.append(token)
        if token == EOS:
            break
        if not jumps or len(output) == max_new:
            continue
        room = max_new - len(output) + 1
        whole = spell(PIECES[token] + matcher.forced(), whole=True)
        if not logprobs and matcher.at + len(matcher.forced()) == len(places) and len(whole) < room:
            output[-1:] = [*whole, EOS]
            break
        tokens = spell(PIECES[token] + matcher.forced())[:room]
        if matcher.forced() and len(tokens) > 2 and not (logprobs and len(tokens) == room):
            matcher.rollback(1)
            output.pop()
            assert all(map(matcher.accept, tokens))
            output += tokens
    return output
