"""What comes back: tokens from the scheduler to the detokenizer, and text from there to the client.

All tokens of one step travel in one message, as arrays: at 500 running requests a message each would cost more than the
step itself.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from bough.core.finish import FinishReason
from bough.core.sampling_params import SamplingParams
from bough.messages.requests import Ping, ProcessCommand, Shutdown

WEIGHT_VERSION = "default"  # of the weights that the engine started with


class LogprobRun(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of consecutive tokens as raw arrays: the few requests that want them pay for unpacking at the edge."""

    tokens: bytes  # int32 [n]
    logprobs: bytes  # float32 [n]; NaN where there is none (the first prompt token)
    top: int
    top_logprobs: bytes  # float32 [n, top]
    top_ids: bytes  # int32 [n, top]
    id_logprobs: bytes  # float32 [n, ids]


class HiddenStates(msgspec.Struct, frozen=True, array_like=True):
    """Of consecutive tokens of prompt and output; they take the place of all from `first` on that came before."""

    first: int
    count: int
    values: bytes  # [count, hidden size] float32, or int32 [count, layers * experts of a token]


class Open(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """A request was taken: how its tokens become text. Sent before anything else about it.

    Of a resumed request it brings the output that was delivered before; if the request is over with that, it also says
    why and is the last word on it.
    """

    handle: int
    sampling: SamplingParams
    prompt_tail: bytes  # int32: the last prompt tokens, which decide how the first output token is spelt
    stream: bool
    output_ids: bytes = b""  # int32
    ended: FinishReason | None = None


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request has its first token: what its prompt cost."""

    handle: int
    prompt_tokens: int  # those that were used: a prompt that is too long may have been cut
    cached_tokens: int
    queue_time_s: float
    input_logprobs: LogprobRun | None = None
    prefill_time_s: float = 0.0  # from when it was admitted
    warnings: tuple[str, ...] = ()  # what of its grammar is not enforced
    weight_version: str = WEIGHT_VERSION
    host_tokens: int | None = None  # of the cached ones, those that came from the host; None: there is no such tier
    storage: tuple[int, str] | None = None  # what came to the host for it from a store, and from which


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """How a request's drafts fared."""

    proposed: int
    held: tuple[int, ...]  # in how many of its steps 0, 1, … drafts held


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """The scheduler's last word on a request."""

    handle: int
    reason: FinishReason
    retractions: int
    drafts: DraftCounts | None = None
    vector: bytes = b""  # float32


class StepOutput(msgspec.Struct, frozen=True, tag=True):
    """What one step brought."""

    handles: bytes = b""  # int64 [n]
    tokens: bytes = b""  # int32, back to back
    counts: bytes = b""  # int32 [n]: how many of them each request got; nothing: one each
    started: list[Started] = []
    ended: list[Ended] = []
    logprobs: dict[int, LogprobRun] = {}  # by handle
    retractions: dict[int, tuple[int, str]] = {}  # by handle, with the weights' version: of those that go on after
    drafts: dict[int, DraftCounts] = {}  # so far, by handle: of requests that a text may end
    states: dict[int, HiddenStates] = {}  # by handle


ToDetokenizer = Open | StepOutput | Ping | ProcessCommand | Shutdown


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """News of one request since its last delta; the one with `finish` is the last."""

    handle: int
    text: str
    ids: bytes  # int32
    started: Started | None = None
    logprobs: list[LogprobRun] = []
    finish: FinishReason | None = None
    retractions: int = 0
    drafts: DraftCounts | None = None
    vector: bytes = b""  # float32, of a request that wanted one
    states: list[HiddenStates] = []
    weight_version: str = ""  # since a retraction or an update


class Deltas(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The deltas of one step, and what requests that were resumed had delivered before: known, but not news."""

    items: list[Delta]
    replays: list[Delta] = []


class Reply(msgspec.Struct, frozen=True, tag=True):
    call: int
    ok: bool
    message: str = ""
    data: dict[str, Any] = {}


class ReplicaLost(msgspec.Struct, frozen=True, tag=True):
    """A scheduler among several has died; the main process tells all clients."""

    dp_rank: int
    reason: str


def facts_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """What commands have changed of the model's description, as the scheduler's state says it."""
    return {name: state[name] for name in ("model_path", "weight_version") if name in state}


ToClient = Deltas | Reply | ProcessCommand | ReplicaLost
