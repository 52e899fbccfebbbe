"""Runs one state of a program: takes its expressions in order and does what they say.

`submit` returns at once. Text and roles are written on the spot while nothing is being waited for; from the first
generation on, expressions queue up and a task on the background loop works them off. Each variable has a slot that is
filled when its turn has come. A branch begins with what its parent has written by then, and asks nobody to wait for it.

Owns the document, the variables and the queue of its state. Whoever reads may be any thread or any event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from bough.core.errors import EngineDeadError, RequestError
from bough.lang import speculation
from bough.lang.backends.base import LOGPROB_OPTIONS, Backend, GenOutput, GenRequest
from bough.lang.document import Document
from bough.lang.expressions import (
    Expr,
    Gen,
    Image,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
    Video,
    as_expr,
    walk,
)
from bough.lang.failure import Failure, Site, calling_site
from bough.lang.loop import background_loop
from bough.lang.reasoning import marks_of
from bough.lang.scoring import normalized
from bough.lang.slots import News, Slot
from bough.lang.usage import Usage

REASONING_SUFFIX = "_reasoning_content"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What holds for one run of a program: its name, its back end, and what generations take that say nothing."""

    program: str
    backend: Backend
    sampling: Mapping[str, Any]
    stream: bool = False
    use_thread: bool = True
    num_api_spec_tokens: int | None = None


@dataclass(slots=True)
class Step:
    """One expression in the queue, the line that it came from, and the variable that it fills."""

    expr: Expr | ForkPoint | Settle
    site: Site | None
    slot: Slot | None = None


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """Branches begin here."""

    children: list[Executor]


@dataclass(frozen=True, slots=True)
class Settle:
    """Somebody waits for a variable of a message that is still being put together."""


class Executor:
    """One state's interpreter."""

    def __init__(self, options: RunOptions, document: Document | None = None) -> None:
        """Without a document it is a branch, and waits for `adopt`."""
        self.options = options
        self.backend = options.backend
        self.document = document or Document(options.backend.chat_format)
        self.slots: dict[str, Slot] = {}
        self.children: list[Executor] = []
        self.own_usage = Usage()
        self.news = News()
        self.ended = False
        self.owner: int | None = threading.get_ident()  # the thread that writes to it
        self._failure: Failure | None = None
        self._lock = threading.RLock()
        self._queue: deque[Step] = deque()
        self._busy = document is None  # the queue is being worked off, or waits for the parent
        self._idle: list[tuple[Future[None], bool]] = []  # who waits, and whether until the end of the program
        self._task: asyncio.Task[None] | None = None
        self._promised: list[Slot] = []  # those that this state will fill, and not its parent
        self._scopes: dict[str, int] = {}
        self._speculates = bool(options.num_api_spec_tokens) and self.backend.chat_only
        self._pattern: list[Step] | None = None  # an assistant message that will be one call

    # Writing ----------------------------------------------------------------------------------------------------------

    def submit(self, value: object) -> None:
        """Queues an expression. A state that has failed takes no more; who reads from it is told why."""
        site = calling_site()
        for expr in walk(as_expr(value)):
            self._submit(Step(expr, site, self._declare(expr)))
        if not self.options.use_thread:
            self.sync()

    def fork(self, count: int) -> list[Executor]:
        """Branches that go on from what is written when the queue has come to this point."""
        children = [Executor(self.options) for _ in range(count)]
        with self._lock:
            self.children += children
            for child in children:
                child.slots = dict(self.slots)
        self._submit(Step(ForkPoint(children), calling_site()))
        return children

    def set_variable(self, name: str, value: Any) -> None:
        self.slots[name] = Slot.of(value)
        self.news.tell()

    def end(self) -> None:
        """Nothing more will be submitted, here or to branches."""
        self.ended = True
        for child in self.children:
            child.end()
        with self._lock:
            self._wake()

    def cancel(self, reason: BaseException, site: Site | None = None) -> None:
        """Gives up, here and in all branches: what runs is aborted, who waits gets an error with this reason."""
        self.fail(Failure(self.options.program, site, self.document.text, reason))
        task = self._task
        if task is not None:
            background_loop().call_soon_threadsafe(task.cancel)
        for child in self.children:
            child.cancel(reason, site)

    # Reading ----------------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> Failure | None:
        return self._failure

    def until_idle(self) -> Future[None]:
        """Done when everything that was submitted has been done; for those outside the program, when it has ended.
        Does not raise."""
        waiter: Future[None] = Future()
        if self._speculates:
            self._submit(Step(Settle(), None))
        with self._lock:
            self._idle.append((waiter, threading.get_ident() != self.owner))
            self._wake()
        return waiter

    def sync(self) -> None:
        """Waits for it."""
        if self._busy or self._speculates or not self.ended:
            self.until_idle().result()

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.to_error()

    def declared(self, name: str) -> Future[None]:
        """Done when the program has come to a variable's declaration, or will never come to it. Its own thread would
        wait in vain."""
        version = self.news.version
        if name in self.slots or self.ended or self._failure is not None or threading.get_ident() == self.owner:
            version = -1
        return self.news.since(version)

    def slot(self, name: str) -> Slot:
        """A variable that is there or will come."""
        slot = self.slots.get(name)
        if slot is None:
            known = ", ".join(map(repr, self.slots)) or "none"
            raise KeyError(f"Program {self.options.program!r} has no variable {name!r}; there are: {known}.")
        if self._speculates and not slot.filled.done():
            self._submit(Step(Settle(), None))
        return slot

    def usage(self) -> Usage:
        """With that of the branches."""
        return sum((child.usage() for child in self.children), self.own_usage)

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return (self.ended or threading.get_ident() == self.owner) and not self._busy

    # The queue --------------------------------------------------------------------------------------------------------

    def _declare(self, expr: Expr) -> Slot | None:
        if isinstance(expr, Gen | Select | ScopeBegin) and expr.name is not None:
            slot = self._promise(expr.name)
            if isinstance(expr, Gen) and expr.reasoning is not None:
                self._promise(expr.name + REASONING_SUFFIX)
            return slot
        return self.slots.get(expr.name) if isinstance(expr, ScopeEnd) else None

    def _promise(self, name: str) -> Slot:
        slot = self.slots[name] = Slot()
        with self._lock:
            self._promised.append(slot)
            if self._failure is not None:
                slot.fail(self._failure.to_error())
        self.news.tell()
        return slot

    def _submit(self, step: Step) -> None:
        with self._lock:
            if self._failure is not None:
                _drop(step, self._failure)
                return
            if self._busy:
                self._queue.append(step)
                return
            quick = QUICK.get(type(step.expr))
            if quick is None or self._pattern is not None:
                self._queue.append(step)
                self._busy = True
                background_loop().call_soon_threadsafe(self._begin)
                return
            self._run_quick(quick, step)

    def _run_quick(self, quick: Callable[[Executor, Step], None], step: Step) -> None:
        try:
            quick(self, step)
        except RequestError as error:
            self.fail(Failure(self.options.program, step.site, self.document.text, error))
        self.news.tell()

    def adopt(self, parent: Executor) -> None:
        """The parent has come to the point where this branch begins."""
        self.document = parent.document.copy()
        self._scopes = dict(parent._scopes)
        with self._lock:
            if self._failure is not None:
                return
            if not self._queue:
                self._rest()
                return
        background_loop().call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        if self._failure is None:
            self._task = background_loop().create_task(self._work_off())

    async def _work_off(self) -> None:
        while True:
            with self._lock:
                if not self._queue or self._failure is not None:
                    self._rest()
                    return
                step = self._queue.popleft()
            try:
                await self._do(step)
            except asyncio.CancelledError:
                self._fail_at(step, EngineDeadError("The back end went away while it was being waited for."))
                return
            except Exception as error:  # noqa: BLE001  # whatever a back end raises ends this state, and is told
                self._fail_at(step, error)
                return
            self.news.tell()

    async def _do(self, step: Step) -> None:
        if self._pattern is not None:
            await self._put_together(self._pattern, step)
            return
        quick = QUICK.get(type(step.expr))
        if quick is not None:
            quick(self, step)
        elif isinstance(step.expr, Gen):
            await self._generate(step.expr, step.slot)
        elif isinstance(step.expr, Select):
            await self._select(step.expr, step.slot)

    def _rest(self) -> None:
        """The queue is empty. Called with the lock."""
        self._busy = False
        self._wake()

    def _wake(self) -> None:
        """Tells those whose wait is over. Called with the lock."""
        if not self._busy:
            over = self.ended or self._failure is not None
            done = [waiter for waiter, at_end in self._idle if over or not at_end]
            self._idle = [] if over else [entry for entry in self._idle if entry[1]]
            for waiter in done:
                waiter.set_result(None)
        self.news.tell()

    def _fail_at(self, step: Step, error: BaseException) -> None:
        self.fail(Failure(self.options.program, step.site, self.document.text, error))

    def fail(self, failure: Failure) -> None:
        """Ends this state; the first failure counts."""
        with self._lock:
            if self._failure is None:
                self._failure = failure
            queue, self._queue = self._queue, deque()
            self._pattern = None
            for slot in self._promised:
                slot.fail(failure.to_error())
            self._rest()
        for step in queue:
            _drop(step, failure)

    # What expressions do: at once -------------------------------------------------------------------------------------

    def _write(self, step: Step) -> None:
        assert isinstance(step.expr, Text)
        self.document.text += step.expr.value

    def _begin_role(self, step: Step) -> None:
        assert isinstance(step.expr, RoleBegin)
        self.document.begin(step.expr.role, generated=step.expr.generated)
        if step.expr.role == "assistant" and self._speculates:
            self._pattern = []

    def _end_role(self, step: Step) -> None:
        assert isinstance(step.expr, RoleEnd)
        self.document.end(step.expr.role)

    def _begin_scope(self, step: Step) -> None:
        assert isinstance(step.expr, ScopeBegin)
        self._scopes[step.expr.name] = len(self.document.text)

    def _end_scope(self, step: Step) -> None:
        assert isinstance(step.expr, ScopeEnd) and step.slot is not None
        step.slot.fill(self.document.text[self._scopes.pop(step.expr.name) :])

    def _add_image(self, step: Step) -> None:
        assert isinstance(step.expr, Image)
        self.document.add_image(step.expr.source, placed=not self.backend.chat_only)

    def _add_video(self, step: Step) -> None:
        assert isinstance(step.expr, Video)
        self.document.videos += ((step.expr.path, step.expr.num_frames),)

    def _begin_branches(self, step: Step) -> None:
        assert isinstance(step.expr, ForkPoint)
        for child in step.expr.children:
            child.adopt(self)

    def _nothing(self, step: Step) -> None:
        """Nothing is being put together, so there is nothing to settle."""

    # What expressions do: with a back end -----------------------------------------------------------------------------

    async def _generate(self, gen: Gen, slot: Slot | None) -> None:
        if gen.reasoning is not None and self.options.stream:
            raise RequestError("separate_reasoning() needs the whole answer; run without stream=True.")
        request = self._request(gen.sampling)
        output = await (self._read_stream(request, slot) if self._streams(request) else self.backend.generate(request))
        for meta in output.metas:
            self.own_usage.add(meta)
        if gen.reasoning is not None:
            output = self._without_reasoning(gen, output)
        self.document.text = request.text + output.texts[0]
        if slot is not None:
            many = len(output.texts) > 1
            slot.fill(*((output.texts, output.metas) if many else (output.texts[0], output.metas[0])))

    def _streams(self, request: GenRequest) -> bool:
        return self.options.stream and request.sampling.get("n", 1) == 1

    async def _read_stream(self, request: GenRequest, slot: Slot | None) -> GenOutput:
        output = GenOutput([""], [{}])
        async for output in self.backend.stream(request):
            self.document.text = request.text + output.texts[0]
            if slot is not None:
                slot.partial, slot.meta = output.texts[0], output.metas[0]
            self.news.tell()
        return output

    def _request(self, own: Mapping[str, Any]) -> GenRequest:
        merged = {**self.options.sampling, **own}
        options = {name: merged.pop(name) for name in LOGPROB_OPTIONS if name in merged}
        document = self.document
        if document.role == "assistant" and document.chat_format.stop:
            given = merged.get("stop") or ()
            merged["stop"] = (*((given,) if isinstance(given, str) else given), *document.chat_format.stop)
        images = [source for _, source in document.images]
        return GenRequest(document.text, document.all_messages, merged, options, images, document.videos)

    def _without_reasoning(self, gen: Gen, output: GenOutput) -> GenOutput:
        marks = marks_of(gen.reasoning or "")
        thoughts, answers = zip(*map(marks.split, output.texts), strict=True)
        if gen.name is not None:
            self.slots[gen.name + REASONING_SUFFIX].fill(thoughts[0] if len(thoughts) == 1 else list(thoughts))
        return GenOutput(list(answers), output.metas)

    async def _select(self, select: Select, slot: Slot | None) -> None:
        method = select.method
        scores = await self.backend.score(
            self.document.text, select.choices, unconditional=method.requires_unconditional_logprobs
        )
        for meta in scores.metas:
            self.own_usage.add(meta)
        decision = method(
            choices=select.choices,
            normalized_prompt_logprobs=[normalized(tokens) for tokens in scores.tokens],
            input_token_logprobs=scores.tokens,
            output_token_logprobs=[meta.get("output_token_logprobs") or [] for meta in scores.metas],
            unconditional_token_logprobs=scores.alone,
        )
        self.document.text += decision.decision
        if slot is not None:
            slot.fill(decision.decision, decision.meta_info)

    # A message of several generations as one call ----------------------------------------------------------------------

    async def _put_together(self, pattern: list[Step], step: Step) -> None:
        """Collects the parts of an assistant message, and asks for all of them when it ends or somebody waits."""
        if isinstance(step.expr, Text | Gen):
            pattern.append(step)
            return
        self._pattern = None
        generations = [part for part in pattern if isinstance(part.expr, Gen)]
        if len(generations) == 1 and pattern[0] is generations[0]:
            await self._do(pattern[0])
            for part in pattern[1:]:
                self._write(part)
        elif generations:
            await self._speculate(pattern)
        else:
            for part in pattern:
                self._write(part)
        await self._do(step)

    async def _speculate(self, pattern: Sequence[Step]) -> None:
        items = [part.expr for part in pattern if isinstance(part.expr, Text | Gen)]
        own = next(dict(item.sampling) for item in items if isinstance(item, Gen))
        own |= {"max_new_tokens": self.options.num_api_spec_tokens, "stop": (), "n": 1}
        for _ in range(speculation.ATTEMPTS):
            output = await self.backend.generate(self._request(own))
            self.own_usage.add(output.metas[0])
            texts = speculation.match(items, output.texts[0])
            if texts is not None:
                break
        else:
            raise speculation.no_match(items)
        for part, text in zip(pattern, texts, strict=True):
            self.document.text += text
            if part.slot is not None:
                part.slot.fill(text, output.metas[0])


def _drop(step: Step, failure: Failure) -> None:
    """A step that will not be done: branches that would have begun there fail, too."""
    for child in step.expr.children if isinstance(step.expr, ForkPoint) else ():
        child.fail(failure)


QUICK: dict[type, Callable[[Executor, Step], None]] = {
    Text: Executor._write,
    RoleBegin: Executor._begin_role,
    RoleEnd: Executor._end_role,
    ScopeBegin: Executor._begin_scope,
    ScopeEnd: Executor._end_scope,
    Image: Executor._add_image,
    Video: Executor._add_video,
    ForkPoint: Executor._begin_branches,
    Settle: Executor._nothing,
}
