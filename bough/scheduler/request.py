"""One request as the scheduler sees it, from the moment it is taken until it has ended.

Only the methods of `Request` change its fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bough.core.media import MediaPrompt
from bough.core.plan import IntArray, LogprobSpec, PositionLogprobs
from bough.core.pooling import Pooling
from bough.core.sampling_params import SamplingParams
from bough.memory.tree.node import Node
from bough.messages.outputs import DraftCounts
from bough.messages.requests import Thinking
from bough.observability.timeline import Stage
from bough.scheduler.constraint import Constraint

MOST_STAGES = 128  # from here on, further ones of a kind are counted as one


@dataclass(slots=True, eq=False)
class Request:
    """`tokens` is the prompt with the output so far while the request waits; while it runs, its row holds them. One
    that was resumed has output from the beginning, like one that was retracted."""

    handle: int
    tokens: IntArray
    prompt_len: int
    sampling: SamplingParams
    seed: int
    max_new: int  # max_new_tokens, cut to what the context and the pool can hold
    stop_ids: frozenset[int]
    namespace: str
    priority: int
    logprobs: LogprobSpec | None
    arrival: int  # order of arrival; kept over retractions, so a retracted request goes first again
    since: float  # when it last began to wait, or, while it has a row, to run
    # The positions from `logprob_next` to `logprob_end` are still to be scored: each tells of the token behind it, in
    # the prompt or, where a grammar forced tokens, in the output.
    logprob_next: int
    logprob_end: int
    names: frozenset[str] = frozenset()  # what an abort may call it
    stream: bool = False  # its tokens are watched as they come
    adapter: str = ""  # what it computes with beside the model's weights
    slot: int = 0  # that of its adapter, while it runs
    row: int = -1
    node: Node | None = None  # the tree node that this request holds a lock on
    branch: int = 0  # where its tokens leave those of earlier requests: a chunk ends there, with a copy of its state
    cached_tokens: int = -1  # of the prompt, found in the cache when first admitted
    fetched_tokens: int = 0  # of those, from the host
    storage: tuple[int, str] | None = None  # what came to the host for it from a store, and from which
    started: bool = False
    retractions: int = 0
    queue_time_s: float = 0.0  # from its arrival until it was first admitted
    ran_s: float = 0.0  # in the stays that a retraction ended
    input_logprobs: list[PositionLogprobs] = field(default_factory=list)
    thinking: Thinking | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    processor: str | None = None  # the user's own code over its logits
    warnings: tuple[str, ...] = ()  # what of the request has no effect
    pooling: Pooling | None = None  # it ends with a vector
    media: MediaPrompt | None = None  # what its prompt has beside text
    constraint: Constraint | None = None  # its grammar, once compiled, the budget of its thinking, its bad words
    unsent: int = 0  # output tokens at the end that the client has not got yet: forced ones whose logprobs are awaited
    forced_logprobs: list[PositionLogprobs] = field(default_factory=list)
    proposed_drafts: int = 0
    held_drafts: list[int] = field(default_factory=list)  # in how many of its steps 0, 1, … drafts held
    arrived: float = 0.0
    stage: str = "queued"  # or "grammar", "fetch", "prefill", "decode", "retracted"
    stages: list[Stage] = field(default_factory=list)  # those before it
    answered_at: float = 0.0  # when its last token was there

    def enter(self, stage: str, now: float, tokens: int = 0) -> None:
        """Its stage is over, which was about so many tokens, and the next begins."""
        if stage == self.stage and not tokens:
            return
        if len(self.stages) >= MOST_STAGES and self.stages[-1][0] == self.stage:
            tokens += self.stages.pop()[2]
        self.stages.append((self.stage, now, tokens))
        self.stage = stage

    def record(self, output: int, now: float, *, ended: bool) -> dict[str, Any]:
        """What it has been through until now, with so many output tokens."""
        stages = [*self.stages, (self.stage, self.answered_at or now, self._decoded(output))]
        facts = {"id": self.handle, "arrived": self.arrived, "prompt": self.prompt_len, "output": output}
        return facts | {"cached": max(self.cached_tokens, 0), "stages": stages, "ended": ended}

    def _decoded(self, output: int) -> int:
        """Tokens of its stage, if that is a decode."""
        before = sum(tokens for name, _, tokens in self.stages if name == "decode")
        return max(0, output - before) if self.stage == "decode" else 0

    def answer(self, now: float) -> None:
        """Its last token is there; its pages are given back later."""
        self.answered_at = now

    def begin_running(self, now: float) -> None:
        self.enter("prefill", now)
        if not self.retractions:
            self.queue_time_s = now - self.since
        self.since = now

    def begin_waiting_again(self, now: float) -> None:
        """After a retraction."""
        self.enter("retracted", now, self._decoded(self.generated))
        self.retractions += 1
        self.ran_s += now - self.since
        self.since = now

    def take_slot(self, slot: int) -> None:
        self.slot = slot

    def take_row(self, row: int) -> None:
        self.row = row

    def leave_row(self, tokens: IntArray) -> None:
        """The row goes to others; the request keeps these tokens, prompt and output."""
        self.row, self.tokens = -1, tokens

    def lock(self, node: Node | None) -> None:
        self.node = node

    def count_cached(self, tokens: int, fetched: int) -> None:
        """So many of its tokens were found in the cache, the last `fetched` on the host; the first admission counts."""
        if self.cached_tokens < 0:
            self.cached_tokens = min(tokens, self.prompt_len)
            self.fetched_tokens = max(0, self.cached_tokens - tokens + fetched)

    def count_stored(self, tokens: int, store: str) -> None:
        """So many more of its tokens are on the host, from a store; what comes too late for it does not count."""
        if self.cached_tokens < 0:
            self.storage = tokens, store

    def branch_off(self, length: int) -> None:
        self.branch = length

    def constrain(self, constraint: Constraint) -> None:
        self.constraint = constraint

    def begin_output(self, tokens: Sequence[int]) -> None:
        """Puts tokens behind the prompt of a waiting request; the client gets them with the first that is sampled."""
        self.tokens = np.concatenate([self.tokens, np.array(tokens, dtype=np.int32)])
        self.unsent = len(tokens)

    def end_after_one(self) -> None:
        """Another engine goes on behind the next token."""
        self.max_new = min(self.max_new, self.generated + 1)

    def take_over(self, output: IntArray) -> None:
        """Another engine has computed the prompt, and these tokens behind it."""
        self.tokens, self.started = np.concatenate([self.tokens, output]), True
        self.logprob_next = self.logprob_end

    def count_drafts(self, proposed: int, held: int) -> None:
        self.proposed_drafts += proposed
        self.held_drafts += [0] * (held + 1 - len(self.held_drafts))
        self.held_drafts[held] += 1

    def start(self) -> None:
        self.started = True

    def hold_back(self, known: int) -> tuple[int, int]:
        """How many tokens at the end were unsent before, and how many of `known` are now: those not scored yet."""
        before = self.unsent
        self.unsent = known - 1 - self.logprob_next if self.logprob_next < self.logprob_end else 0
        return before, self.unsent

    # -- logprobs of given tokens --------------------------------------------------------------------------------------

    def score_between(self, first: int, end: int) -> None:
        """These positions are to be scored."""
        self.logprob_next, self.logprob_end = first, end

    def plan_scores(self, end: int) -> None:
        """A planned step scores the positions before `end`."""
        self.logprob_next = end

    def add_scores(self, scores: PositionLogprobs) -> None:
        (self.forced_logprobs if self.started else self.input_logprobs).append(scores)

    def take_forced_logprobs(self) -> list[PositionLogprobs]:
        taken, self.forced_logprobs = self.forced_logprobs, []
        return taken

    @property
    def drafts(self) -> DraftCounts | None:
        """How they fared; None: there is no speculation."""
        return DraftCounts(self.proposed_drafts, tuple(self.held_drafts)) if self.held_drafts else None

    @property
    def generated(self) -> int:
        """Output tokens so far; meant for a request that waits."""
        return len(self.tokens) - self.prompt_len

    @property
    def match_cap(self) -> int:
        """How much of `tokens` may come from the cache: the last token must be computed to have logits to sample from,
        and so must every position whose logprob was asked or whose state is pooled."""
        if self.pooling is not None and self.pooling.mode != "last":
            return 0
        if self.logprob_next < self.logprob_end:
            return self.logprob_next
        return len(self.tokens) - 1
