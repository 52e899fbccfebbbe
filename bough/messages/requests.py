"""What the scheduler receives: requests and commands from the client, and the detokenizer's word on ended streams."""

import logging
from typing import Any, ClassVar, Literal

import msgspec

from bough.core.child_environment import settle_garbage
from bough.core.control import ClientCommand, ProfileStart
from bough.core.media import MediaPrompt
from bough.core.pooling import Pooling
from bough.core.sampling_params import SamplingParams

PauseMode = Literal["abort", "retract", "in_place"]


class LogprobRequest(msgspec.Struct, frozen=True):
    """Which logprobs a request wants. `start` is the first prompt position; -1 asks for those of the output alone."""

    start: int = -1
    top: int = 0
    ids: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """How many logprobs are returned for each token."""
        return 1 + self.top + len(self.ids)


class Thinking(msgspec.Struct, frozen=True):
    """How a model's thinking is marked, in tokens. A grammar holds for what comes after it; a `budget` ends it."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    cut: tuple[int, ...]  # what is said for the model when the budget is used up
    begun: bool = False  # the prompt has opened it
    budget: int | None = None  # most tokens


class Bootstrap(msgspec.Struct, frozen=True):
    """Which prefill engine computes the prompt, and by which number both engines know the request."""

    host: str = ""
    port: int = 0
    room: int | None = None  # None: the decode engine brings the request there itself


class SessionParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where in an open session a request stands: behind the prompt and output of the one named `rid`, cut to `offset`
    tokens, or without its output. It may `replace` what went on there before."""

    id: str | None = None  # None: in none
    rid: str | None = None
    offset: int | None = None
    replace: bool | None = None
    drop_previous_output: bool | None = None


class Generate(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """One prompt to continue. `handle` names the request between processes, `rid` to the user. A request whose stream
    broke elsewhere is resumed: it comes with the tokens that it has generated already."""

    handle: int
    rid: str
    input_ids: bytes  # int32
    sampling: SamplingParams
    seed: int
    namespace: str = ""
    priority: int = 0
    logprobs: LogprobRequest | None = None
    stream: bool = False
    names: tuple[str, ...] = ()  # what an abort may call it beside its rid: the id of its batch or its samples
    output_ids: bytes = b""  # int32: of a resumed request
    thinking: Thinking | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()  # of several tokens each
    custom_logit_processor: str | None = None
    pooling: Pooling | None = None  # ends with a vector; `sampling` then has no new tokens
    bootstrap: Bootstrap | None = None
    adapter: str = ""  # by its name; empty: the model as it is
    media: MediaPrompt | None = None
    session: SessionParams | None = None
    followed: bool = False  # others of its call are on their way
    made_at: float = 0.0  # before its media were prepared, by the clock of the clients' host; 0: on another host


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Ends requests wherever they are; their callers still get a terminal message. Those with this handle, or with
    this name, whichever client sent them; with neither, all. Also those that were made before it and come after it."""

    handle: int | None = None
    message: str = "The request was aborted."
    name: str | None = None
    made_at: float = 0.0  # by the clock of the clients' host; 0: it means only what has come


class StreamEnded(msgspec.Struct, frozen=True, tag=True):
    """The detokenizer found a stop string and has already answered: free the request, say nothing more."""

    handle: int
    generated: int = 0  # tokens of the answer


class Call(msgspec.Struct, frozen=True):
    """What is answered with a `Reply` to the call of this number."""

    call: int


class FlushCache(Call, frozen=True, tag=True):
    """Empties the prefix cache, if nothing is running."""

    flush_cache: ClassVar[bool] = True  # as a `Control` may do, too


class ChangeStorage(Call, frozen=True, tag=True):
    """Changes the store below the host's memory; `settings` are those of `MemorySettings` that become others."""

    action: Literal["attach", "detach", "clear"]
    settings: dict[str, Any] = {}


class GetState(Call, frozen=True, tag=True):
    """What `/server_info` shows of the scheduler."""


class GetTree(Call, frozen=True, tag=True):
    """The nodes of the prefix cache that were used last, at most `limit`; or the tokens of one, by the clock's reading
    when it came and its first position."""

    limit: int
    node: tuple[int, int] | None = None


class GetTimeline(Call, frozen=True, tag=True):
    """The steps and requests that ended after `since`, by the engine's clock, and those that run; and which of them is
    called `name`."""

    since: float = 0.0
    name: str = ""


class Ping(Call, frozen=True, tag=True):
    """Goes the way of a request: the scheduler hands it on and the detokenizer replies. Both are alive when it comes
    back."""


class ProcessCommand(Call, frozen=True, tag=True):
    """For each process of the engine and each client: the scheduler does it and hands it on, the detokenizer does it,
    tells all clients, and replies."""

    freeze_gc: bool = False
    log_level: str | None = None
    log_requests: bool | None = None  # of those that serve HTTP
    log_requests_level: int | None = None

    def obey(self) -> None:
        if self.freeze_gc:
            settle_garbage()
        if self.log_level is not None:
            logging.getLogger("bough").setLevel(self.log_level.upper())


class ChangeSettings(Call, frozen=True, tag=True):
    """Gives settings of the scheduler (`LIVE_SETTINGS`) other values, which were checked before."""

    values: dict[str, Any]


class Pause(Call, frozen=True, tag=True):
    """Stops computing until `Resume`; requests are taken in and wait. `mode` says what becomes of those that run:
    abort ends all, retract sends them back to the queue without their pages, in_place leaves them in their rows."""

    mode: PauseMode = "abort"


class Resume(Call, frozen=True, tag=True):
    """Ends a `Pause`."""


class StartProfile(Call, frozen=True, tag=True):
    """Records what the engine does, from `start_step` steps on, for `num_steps` steps or until `StopProfile`."""

    start_step: int = 0
    num_steps: int | None = None
    command: ProfileStart = ProfileStart()


class StopProfile(Call, frozen=True, tag=True):
    """Ends the recording and writes it to its file."""


class Control(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A command for the executor while nothing runs. Requests that arrive behind it wait until it is done."""

    call: int
    command: ClientCommand
    wait: bool = False  # for the requests that arrived before it; else it is refused while there are any
    abort_all: bool = False  # ends those requests
    flush_cache: bool = False  # once it is done
    facts: dict[str, str] = {}  # what the engine's state says from then on


class ChangeAdapters(Call, frozen=True, tag=True):
    """Loads an adapter, which requests may then choose by its name; without a path it is forgotten, if no request uses
    it. One that is `pinned` keeps its slot."""

    name: str
    path: str | None = None
    pinned: bool = False


class ChangeSession(Call, frozen=True, tag=True):
    """Opens a session, which is closed when it was not used for so long, or closes it."""

    id: str
    open: bool = True
    timeout_s: float | None = None


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Ends the process. Open requests are aborted first."""


class JoinStep(msgspec.Struct, frozen=True, tag=True):
    """From another attention group: so many steps there are to be, in all of them."""

    number: int


class Garbled(msgspec.Struct, frozen=True, tag=True):
    """Stands where a frame arrived that is no message; made by receivers, never sent. `handle` is the request or the
    call of which it speaks, where that can be read: somebody waits for its answer."""

    handle: int | None
    error: str


Question = GetState | GetTree | GetTimeline | Ping | StartProfile | StopProfile
Setting = ChangeSettings | ChangeAdapters | ChangeSession | ChangeStorage
Change = FlushCache | ProcessCommand | Pause | Resume | Control | Setting
Command = Question | Change
ToScheduler = Generate | Abort | StreamEnded | Command | Shutdown | Garbled
