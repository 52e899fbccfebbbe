"""The contract between what runs next and how it runs: `BatchPlan` in, `StepResult` out.

Each running request owns a *row*, a small integer. What the device must know of a request lives on the device under
that row: its page table, its length, its last sampled token, its sampling parameters. A plan carries only changes.

Order is the synchronisation: an executor applies plans in the order it was given them, and inside a plan first
`dropped`, then `setups`, `edits` and the new pages, then `encodes`, then the forward pass, in which every layer stores
the keys and values of all rows before any row attends. So a row may read pages that another row of the same plan
writes, and a page may go to a new owner as soon as the plans that read it have been launched. In a plan of decodes
alone nobody reads what another row stores, so executors may attend for one row before they store for another.

Grammar masks come late: they depend on the token of step t, which the host learns when step t + 1 is running. A plan
says which rows are `masked`, and the masks follow by `supply_masks`; only the sampling of that step waits for them.

Pages come in *groups*, one page table for each kind of layer (`KVGroup`); the first is full attention. In a window
group a row owns only the pages in its window; entries behind it are 0 or stale and are not read. In a state group a row
has one page, its state, and the pages it gets with a step receive copies of its state after the step. Page 0 belongs to
nobody: padding is written there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bough.core.control import Command, Pending, Ticket
from bough.core.media import Feature, MediaItem, MediaKind
from bough.core.model_config import FULL_ATTENTION, KVGroup
from bough.core.pooling import Pooling, VectorConfig
from bough.core.sampling_params import SamplingParams
from bough.core.speech import SpeechConfig

IntArray = npt.NDArray[np.int32]
HostMemory = Sequence[npt.NDArray[np.uint8]]  # of each KV group the pages of a lower tier: [pages + 1, bytes]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]


def positions_in_runs(counts: IntArray) -> IntArray:
    """0, 1, … for each of the counts, back to back: where repeated things stand among their like."""
    ends = counts.cumsum(dtype=np.int32)
    return np.arange(ends[-1] if len(ends) else 0, dtype=np.int32) - (ends - counts).repeat(counts)


@dataclass(frozen=True, slots=True)
class LogprobSpec:
    """What a row wants to know beside each sampled token: its logprob, the `top` best, and those of chosen `ids`."""

    top: int = 0
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowSetup:
    """Sent when a request takes a row, and again when it goes on behind tokens that were not sampled there (forced by
    its grammar); overwrites whatever the row held."""

    row: int
    sampling: SamplingParams
    seed: int  # resolved: random numbers are a function of (seed, output position)
    # Per group: the pages of the cached prefix, or all that the row has. Of a state group two: the row's own page, and
    # the page with the state that it begins with; 0: it begins with the state of an empty sequence.
    pages: tuple[IntArray, ...]
    length: int  # tokens those pages hold
    generated: int  # output tokens so far: > 0 after a retraction or forced tokens, and of a resumed request
    history: IntArray | None  # prompt + output so far, only for rows with penalties or sound
    prompt_len: int  # how much of `history` is prompt
    logprobs: LogprobSpec | None
    stop_ids: tuple[int, ...]  # what must not be sampled before min_new_tokens
    processor: str | None = None  # the user's own code over its logits, as its text
    # The row ends with a vector, which the last chunk of its prompt gives; or every step gives its tokens' states.
    pooling: Pooling | None = None
    adapter: int = 0  # the slot of the adapter that it computes with (`PlaceAdapter`); 0: none
    audio: MediaItem | None = None  # what the row hears; such a row has a `history`, too
    delta: int = 0  # what is added to the places of its tokens where they rotate (`MediaPrompt.delta`)


@dataclass(frozen=True, slots=True)
class PageSwap:
    """Replaces entries of a row's page table: the same tokens stand in `pages` too; the row's own are given back."""

    row: int
    group: int
    first: int  # index into the row's page table
    pages: IntArray


@dataclass(frozen=True, slots=True)
class InputLogprobs:
    """Asks a prefill chunk for the logprobs of the prompt tokens that follow its positions."""

    index: int  # the row's place in the batch
    first: int  # first position, counted inside the chunk
    count: int  # positions, each with a prompt token after it
    next_token: int  # the prompt token after the chunk, target of its last position; -1 when that is not asked for


@dataclass(frozen=True, slots=True)
class Encode:
    """An item that an encoder computes before the forward pass; its output is kept under a number."""

    output: int
    kind: MediaKind
    rows: int  # that the output has
    features: tuple[Feature, ...]
    file: str


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step, complete when made."""

    step: int
    setups: tuple[RowSetup, ...]
    edits: tuple[PageSwap, ...]
    rows: IntArray  # [batch], decodes first, then prefill chunks
    query_lens: IntArray  # [batch] tokens this row computes in this step
    # [batch] how many of them stand in `tokens`. Equal to query_len: a prefill chunk, even of one token. Fewer: a
    # decode. It computes the row's last sampled token, which only the device knows yet, then the given ones, then
    # tokens that the device guesses itself: all but the first are drafts to verify.
    given: IntArray
    tokens: IntArray  # [sum of given and spare], back to back
    # Per group: pages appended to the rows' tables, in batch order; of a state group, where copies of states go.
    new_pages: tuple[IntArray, ...]
    new_page_counts: tuple[IntArray, ...]  # per group: [batch]
    sample: BoolArray  # [batch] decodes and the last chunk of a prefill sample; earlier chunks do not
    input_logprobs: tuple[InputLogprobs, ...] = ()
    masked: BoolArray | None = None  # [batch] rows that sample under a mask; None: none does, and none is supplied
    # [batch] how many more tokens than `given` a decode brings, because the host does not know yet how many tokens its
    # last step gave: of a row that got n, the first n - 1 are passed over. None: nobody has any.
    spare: IntArray | None = None
    # [drafts] Where decodes have trees: of each draft the place among its row's tokens that it follows, 0 for the row's
    # own; all stand behind what they follow. None: each follows the one before it.
    parents: IntArray | None = None
    # [batch] How many first tokens each has on the same pages of the first group as the row before it: a prefix that
    # several rows read, cached before this step. None: nobody has any.
    common: IntArray | None = None
    # [decodes] The token that each begins with, where another stage of a pipeline has sampled it.
    last_tokens: IntArray | None = None
    # [chunks] The prompt token behind each chunk, which a draft model looks at; of those that sample it means nothing.
    next_tokens: IntArray | None = None
    dropped: tuple[int, ...] = ()  # encoder outputs that are let go, before anything else
    encodes: tuple[Encode, ...] = ()
    # [runs, 4] Where encoder outputs stand in the place of tokens: the first of them, counted among those of chunks;
    # the output, its first row there, and how many. None: nowhere.
    media: IntArray | None = None
    undrafted: bool = False  # the draft model, if there is one, has no part in this step
    # [3, tokens of chunks] The places by which these rotate, of models with several for each token. None: all stand
    # in the order of their sequences, a row's `delta` added.
    positions: IntArray | None = None

    @property
    def sample_widths(self) -> IntArray:
        """The most tokens that each sampling row can get: a decode as many as it computes, a prompt one."""
        return np.where(self.given < self.query_lens, self.query_lens, 1)[self.sample]

    def aligned(self, counts: IntArray) -> BatchPlan:
        """The same plan without spare tokens, by how many tokens each of its rows got in its last step. [batch]"""
        if self.spare is None:
            return self
        passed = np.clip(counts - 1, 0, self.spare)
        first = (self.given + self.spare).cumsum(dtype=np.int32) - self.given - self.spare + passed
        return replace(self, tokens=self.tokens[first.repeat(self.given) + positions_in_runs(self.given)], spare=None)


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What the masked rows of a step may sample, in batch order: bit i % 32 of word i // 32 allows token i. A decode
    with drafts has a mask for its own token and one behind each draft."""

    words: IntArray  # [masked positions, mask_words(vocab_size)]


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Logprobs of a run of tokens of one row, from the model's own distribution (no temperature, penalty or mask)."""

    tokens: IntArray  # [n]
    logprobs: FloatArray  # [n]
    top_logprobs: FloatArray  # [n, top]
    top_ids: IntArray  # [n, top]
    id_logprobs: FloatArray  # [n, ids]

    def first(self, count: int) -> PositionLogprobs:
        """Those of the first tokens of the run."""
        return PositionLogprobs(*(getattr(self, f.name)[:count] for f in fields(self)))

    @staticmethod
    def joined(runs: Sequence[PositionLogprobs]) -> PositionLogprobs:
        if len(runs) == 1:
            return runs[0]
        names = [f.name for f in fields(PositionLogprobs)]
        return PositionLogprobs(*(np.concatenate([getattr(run, name) for run in runs]) for name in names))


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, by position in its plan; rows that did not sample are left out of `tokens`.

    A prompt gives one token. A decode gives as many of its drafts as hold and one more, or none: then its row stays as
    it was. The row's length grows by the count; what the decode computed beyond that is overwritten later."""

    step: int
    tokens: IntArray  # [sampled rows, width]
    counts: IntArray  # [sampled rows] how many of them hold
    bad: BoolArray  # [sampled rows] the logits were not finite or no token was allowed: that request fails, alone
    output_logprobs: dict[int, PositionLogprobs]  # by index in the batch
    input_logprobs: dict[int, PositionLogprobs]  # by index in the batch
    # When the step was on the device, by `time.monotonic`; None: unknown.
    device_span: tuple[float, float] | None = None
    # By index in the batch: of prompts that are complete; or of each token of the row, drafts too. [tokens, hidden]
    vectors: dict[int, FloatArray] = field(default_factory=dict)
    encode_s: float = 0.0  # that encoders took
    not_encoded: tuple[int, ...] = ()  # outputs that they could not compute: they are not numbers

    @staticmethod
    def without_tokens(
        step: int, inputs: dict[int, PositionLogprobs], span: tuple[float, float] | None = None
    ) -> StepResult:
        none = np.zeros(0, dtype=np.int32)
        return StepResult(step, none.reshape(0, 1), none, none.astype(np.bool_), {}, inputs, span)


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """What an executor does with images, video and sound."""

    placeholder: int  # the token that plans have where encoder outputs stand
    row_bytes: int  # of one row of an output
    whole: bool = False  # a chunk holds an item whole: its tokens attend to those behind them, too
    width: int = 0  # numbers in each vector that a prompt may have in the place of a token; 0: none may be


@dataclass(frozen=True, slots=True)
class Limits:
    """What an executor can hold; known only once it has loaded its weights and measured what is left."""

    rows: int
    page_size: int
    pages: tuple[int, ...]  # per group, page 0 not counted: usable pages are 1..n
    context_length: int
    vocab_size: int
    chunk_tokens: int  # most prefill tokens in one plan; decodes come on top, each with its drafts
    note: str  # one line for the start log: how many tokens fit, and why
    even_tokens: int = 1  # steps of multiples of this many tokens fill the device's tiles: worth aiming at
    late_plans: bool = False  # a step need not be launched before the one ahead of it is about to end
    drafts: int = 0  # tokens that the executor itself guesses and verifies with each decode
    adaptive_drafts: bool = True  # only as many of them as are worth their time
    draft_levels: int = 0  # where they are a tree: how many may follow each other; 0: they are a chain
    groups: tuple[KVGroup, ...] = (FULL_ATTENTION,)  # what `pages` counts
    page_bytes: tuple[int, ...] = ()  # per group: what one page holds on a rank, over all layers
    cache_dtype: str = ""  # the number format of what pages hold
    shares_reads: bool = False  # the executor makes use of `BatchPlan.common`
    ranks: int = 1
    stages: int = 1  # of a pipeline: as many steps are in flight, and a row decodes once the host knows its token
    vectors: VectorConfig | None = None  # what requests end with; None: with tokens
    speech: SpeechConfig | None = None  # requests bring a recording each; None: they bring none
    whole_prompts: bool = False  # prompts are computed in one step, and nothing is kept of them: an encoder's
    media: MediaLimits | None = None  # None: prompts are text alone
    in_step: bool = False  # with other attention groups: all do a command or none, so one that refuses tells the others

    @property
    def can_go_back(self) -> bool:
        """A recurrent state cannot: by the token that a jump replaces."""
        return all(group.kind != "state" for group in self.groups)

    def copied_bytes(self, group: int) -> int:
        """What a copy of one page takes, with the parts of all ranks."""
        return self.page_bytes[group] * self.ranks


InFlight = Pending[StepResult]


class Executor(Protocol):
    """Runs plans and does commands, strictly in order."""

    def limits(self) -> Limits: ...

    def launch(self, plan: BatchPlan) -> InFlight:
        """Returns at once; the step runs after all those launched before."""

    def drafted(self, step: int) -> BatchPlan:
        """The newest step launched, which has masked rows, with the drafts that the device makes for it as if they were
        given. Waits for them."""

    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        """Lets the newest step launched, which has masked rows, sample; comes once for each such step, before its
        `wait` and before the next launch."""

    def control(self, command: Command) -> Ticket:
        """Returns at once; the command is done after all plans launched before it and before those launched later."""

    def idle(self, busy: bool = False) -> bool:
        """Nothing is in flight and nothing waits: does a piece of work that was put off, if there is any. False: there
        was none, and there is no use in asking again before the next step. `busy`: steps are in flight and will follow,
        so it does at most one piece, from which steps like the last ones gain."""

    def close(self) -> None: ...
