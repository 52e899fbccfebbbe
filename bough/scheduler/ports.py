"""What the scheduler needs of the world, as narrow protocols: tests implement them with fakes."""

from collections.abc import Sequence
from typing import Protocol

from bough.constrained.interface import GrammarSpec, Ticket
from bough.core.plan import HostMemory, IntArray
from bough.memory.tree.events import KVEvent
from bough.messages.outputs import Open, Reply, StepOutput
from bough.messages.requests import Ping, ProcessCommand, ToScheduler


class Inbox(Protocol):
    """Where requests and commands arrive."""

    def receive(self, timeout_s: float | None = 0.0) -> list[ToScheduler]:
        """Everything that has arrived; waits up to `timeout_s` (None: for ever) for a first message."""


class Outbox(Protocol):
    """Where answers go: tokens to the detokenizer, replies to the client."""

    def tokens(self, message: Open | StepOutput | Ping | ProcessCommand) -> None: ...

    def reply(self, message: Reply) -> None: ...


class CacheEvents(Protocol):
    """Where news of the prefix cache go."""

    def add(self, event: KVEvent) -> None: ...

    def flush(self) -> None:
        """A turn of the loop is over: what was added belongs together."""


class LowerTier(Protocol):
    """What lies below the host's memory, such as a disk or a shared store. Calls come between plans. What it brings up
    it hands to `TieredCache.adopt`, on the scheduler's thread."""

    @property
    def figures(self) -> dict[str, float]: ...

    def offer(self, tokens: IntArray, namespace: str, pages: Sequence[IntArray], buffers: HostMemory) -> None:
        """The host has these tokens: of each group in these pages of its buffer, 0 where it has none. They may change
        after the call."""

    def forget(self, tokens: IntArray, namespace: str) -> None:
        """Nobody may read what was offered of these tokens."""


class Proposer(Protocol):
    """Guesses on the host how a request goes on; the executor verifies that."""

    most: int  # drafts behind one decode
    adaptive: bool  # only as many as are worth their time

    def propose(self, known: IntArray, namespace: str, count: int) -> tuple[IntArray, int]:
        """Up to `count` tokens that may follow the `known` ones of a request, prompt and output; and how many of the
        last known ones it would have guessed the same way."""

    def learn(self, tokens: IntArray, namespace: str) -> None:
        """A request has ended with these tokens; what is learnt of them is for requests of its namespace only."""


class Grammars(Protocol):
    """Compiles grammars, and spells what they force in the model's tokens."""

    def request(self, spec: GrammarSpec) -> Ticket:
        """Begins to compile; returns at once."""

    def spell(self, last: int | None, forced: bytes, *, whole: bool = False) -> Sequence[int]:
        """The tokens of the last token's text and of what must follow it, as the tokenizer would write them together:
        in place of the last token, which need not be the first of them. Without a last token, those of the forced text
        alone. What might still merge with the text behind it is left out, unless the text is `whole` and has none. Only
        after a grammar has been compiled."""

    def close(self) -> None: ...
