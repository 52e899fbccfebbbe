"""Sessions: conversations that the engine remembers, so that a request brings only what is new of them.

Each request of a session is a branch: it names the one that it goes on behind, or begins a conversation of its own.
What ended branches have computed is pinned in the tree until the session is closed or expires. Pins yield to requests
that need the pages (`PrefixCache.yield_pins`); such a branch is computed again when it goes on.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from bough.core.errors import RequestError
from bough.core.finish import FinishAbort
from bough.core.plan import IntArray
from bough.messages.outputs import Reply
from bough.messages.requests import ChangeSession, Generate, StreamEnded
from bough.scheduler.prefix_cache import PrefixCache
from bough.scheduler.request import Request

CHECK_INTERVAL_S = 1.0
IDLE_S = 3600.0  # after which a session is closed that was opened without a timeout
MOST_SESSIONS = 4096
REPLACED = FinishAbort("The request was replaced in its session.", 499, "AbortError")
MOST_TOKENS = 1 << 26  # that all sessions remember, in host memory


@dataclass(slots=True)
class Branch:
    handle: int
    parent: str | None
    prompt_len: int
    ids: IntArray  # prompt and output; of a branch that runs, its prompt
    request: Request | None  # while it waits or runs


@dataclass(slots=True)
class Session:
    idle_s: float
    used_at: float
    branches: dict[str, Branch] = field(default_factory=dict)  # by rid


class Sessions:
    """Owns the open sessions and their pins."""

    def __init__(
        self, cache: PrefixCache, clock: Callable[[], float], abort: Callable[[Request, FinishAbort], None]
    ) -> None:
        self._cache, self._clock, self._abort = cache, clock, abort
        self._open: dict[str, Session] = {}
        self._places: dict[int, tuple[str, str]] = {}  # session and rid by the handle of the request
        self._tokens = 0  # of all branches
        self._looked_at = clock()

    def obey(self, message: ChangeSession) -> Reply:
        """Opens a session, whose id is the reply, or closes it; its requests run on."""
        name = message.id
        if (self._session(name) is not None) is message.open:
            state = "open already; close it first, or choose another id" if message.open else "not open"
            return Reply(message.call, False, f"The session {name!r} is {state}.")
        if not message.open:
            self._close(name)
            return Reply(message.call, True, "The session is closed.")
        if len(self._open) >= MOST_SESSIONS:
            return Reply(message.call, False, f"{MOST_SESSIONS} sessions are open, the most; close one first.")
        self._open[name] = Session(message.timeout_s or IDLE_S, self._clock())
        return Reply(message.call, True, name)

    def expire(self) -> None:
        """Closes sessions that were not used for too long."""
        now = self._clock()
        if now - self._looked_at < CHECK_INTERVAL_S:
            return
        self._looked_at = now
        for name in list(self._open):
            self._session(name)

    @property
    def next_look_s(self) -> float | None:
        """How long an engine at rest may sleep: until a session expires. None: for ever."""
        first = min((session.used_at + session.idle_s for session in self._open.values()), default=None)
        return None if first is None else min(IDLE_S, max(CHECK_INTERVAL_S, first - self._clock()))

    def __len__(self) -> int:
        return len(self._open)

    def joined(self, message: Generate) -> Generate:
        """The request with its whole prompt. Branches that it replaces are aborted and forgotten."""
        if (asked := message.session) is None:
            return message
        name = asked.id or ""
        if (session := self._session(name)) is None:
            raise _wrong(f"The session {name!r} is not open: it was closed, has expired, or never was.")
        if message.media is not None or message.bootstrap is not None:
            raise _wrong("Requests of a session are text alone, and are not handed from engine to engine.")
        if self._tokens > MOST_TOKENS:
            raise _wrong(f"Sessions remember {self._tokens} tokens, more than they may; close some.")
        before = None if asked.rid is None else session.branches.get(asked.rid)
        if asked.rid is not None and before is None:
            raise _wrong(f"The session has no request {asked.rid!r} to go on behind.")
        if asked.replace:
            if before is not None and before.request is not None:
                self._abort(before.request, REPLACED)
            self._prune(name, asked.rid, abort=True)
        if message.rid in session.branches:
            raise RequestError(f"The session has a request {message.rid!r} already; choose another rid.", field="rid")
        session.used_at = self._clock()
        if before is None:
            return message
        if before.request is not None and not asked.drop_previous_output:
            raise _wrong(f"The request {asked.rid!r} still runs; wait for its end, or replace it.")
        kept = before.ids[: before.prompt_len] if asked.drop_previous_output else before.ids
        kept = kept[: asked.offset] if asked.offset else kept
        return msgspec.structs.replace(message, input_ids=kept.tobytes() + message.input_ids)

    def begin(self, message: Generate, request: Request) -> None:
        """The request of this message was taken."""
        if (asked := message.session) is not None:
            prompt = request.tokens[: request.prompt_len]
            name, rid = self._places[request.handle] = asked.id or "", message.rid
            self._open[name].branches[rid] = Branch(request.handle, asked.rid, len(prompt), prompt, request)
            self._tokens += len(prompt)

    def ended(self, request: Request) -> None:
        """The request has left its row and keeps its tokens."""
        if (branch := self._branch(request.handle)) is not None:
            self._tokens += len(request.tokens) - len(branch.ids)
            branch.ids, branch.request = request.tokens, None
            session, _ = place = self._places[request.handle]
            self._open[session].used_at = self._clock()
            self._cache.pin(place, branch.ids, request.namespace)

    def cut(self, message: StreamEnded) -> None:
        """Of an answer that its text has ended, tokens behind that end were never sent: they are no part of it."""
        if (branch := self._branch(message.handle)) is not None and branch.request is None:
            whole, branch.ids = len(branch.ids), branch.ids[: branch.prompt_len + message.generated]
            self._tokens -= whole - len(branch.ids)

    def _session(self, name: str) -> Session | None:
        """The open session of this name. One that has expired is closed, unless it runs."""
        session = self._open.get(name)
        if session is None or self._clock() - session.used_at <= session.idle_s:
            return session
        if any(branch.request is not None for branch in session.branches.values()):
            return session
        self._close(name)
        return None

    def _branch(self, handle: int) -> Branch | None:
        place = self._places.get(handle)
        return None if place is None else self._open[place[0]].branches[place[1]]

    def _close(self, name: str) -> None:
        self._prune(name, None, abort=False)
        del self._open[name]

    def _prune(self, name: str, rid: str | None, *, abort: bool) -> None:
        """Forgets all branches that go on behind this one; all of the session where none is named."""
        branches, children = self._open[name].branches, defaultdict[str | None, list[str]](list)
        for own, branch in branches.items():
            children[branch.parent].append(own)
        gone = list(children[rid])
        for own in gone:  # which grows
            gone += children[own]
        for own in gone:
            branch = branches.pop(own)
            del self._places[branch.handle]
            self._tokens -= len(branch.ids)
            self._cache.unpin((name, own))
            if abort and branch.request is not None:
                self._abort(branch.request, REPLACED)


def _wrong(text: str) -> RequestError:
    return RequestError(text, field="session_params")
