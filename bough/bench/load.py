"""What a load consists of: conversations, most of them of one turn, and the records of what became of each turn."""

from __future__ import annotations

from dataclasses import dataclass, field

Message = dict[str, str]  # role, content
Prompt = str | list[int] | list[Message]


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user adds to a conversation, and how much is to be answered."""

    prompt: Prompt
    output_tokens: int
    input_tokens: int  # as far as the data set knows; the server's own count is preferred


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other; every prompt stands behind all that was said before."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A conversation and the moment of its first turn, in seconds from the start."""

    at_s: float
    conversation: Conversation


@dataclass(slots=True)
class Record:
    """One request. Times are seconds from the start of the load, or durations."""

    began_s: float
    prompt_tokens: int
    output_tokens: int = 0
    cached_tokens: int = 0
    first_s: float = 0.0  # to the first token
    total_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # before each further token
    text: str = ""
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.error is None
