"""The client's side of an engine: gives requests handles, sends them, and brings each delta to its answer.

Owns the open answers. All of it happens on one event loop; other threads come in through that loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, assert_never

from bough.client.answer import Answer, News, Piece
from bough.client.inputs import Inputs, Prompt
from bough.core.errors import EngineDeadError, RequestError
from bough.messages.channels import first_handle
from bough.messages.outputs import Deltas, Reply, ToClient
from bough.messages.requests import (
    Abort,
    Command,
    FlushCache,
    Generate,
    GetState,
    Pause,
    PauseMode,
    Ping,
    Resume,
    StartProfile,
    StopProfile,
)
from bough.observability.request_meter import RequestMeter
from bough.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bough.client.answer import Answer


class RequestWatcher(Protocol):
    """Called in the context of the request: what the log or a trace knows of it holds."""

    def arrived(self, answer: Answer) -> None:
        """It was sent to the engine."""
        ...

    def ended(self, answer: Answer) -> None:
        """Its caller has all of it, or has left (then it is not `done`)."""
        ...


class SchedulerPort(Protocol):
    """The way to the scheduler."""

    def send(self, *messages: Generate | Abort | Command) -> None:
        """Sends all of them, or raises and has sent none."""
        ...


class EngineClient:
    """Submit, stream, abort, control."""

    def __init__(
        self,
        scheduler: SchedulerPort,
        tokenizer: Tokenizer | None,
        number: int = 0,
        *,
        meter: RequestMeter | None = None,
        watchers: Sequence[RequestWatcher] = (),
    ) -> None:
        """`number` tells the clients of one engine apart. All requests are counted by the meter and told to the
        watchers."""
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._handles = itertools.count(first_handle(number))
        self._answers: dict[int, Answer] = {}
        self._rids: dict[str, Answer] = {}  # the latest with each id
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._death: EngineDeadError | None = None
        self._watchers = watchers
        self.meter = meter or RequestMeter()
        self.heard_at = time.monotonic()  # when the last tokens came

    # What callers use -------------------------------------------------------------------------------------------------

    async def generate(self, inputs: Inputs) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole answer. A lone request that the engine refuses raises; in a batch it carries its reason."""
        answers = await self.answers(inputs)
        return [answer.to_dict() for answer in answers] if inputs.batched else answers[0].to_dict()

    async def answers(self, inputs: Inputs) -> list[Answer]:
        """All answers, complete, in the order of the prompts."""
        pieces = self.pieces(inputs, stream=False)
        return sorted([piece.answer async for piece in pieces], key=lambda answer: answer.index)

    async def stream(self, inputs: Inputs) -> AsyncGenerator[dict[str, Any], None]:
        """Cumulative outputs as they grow; those of a batch carry `index` and come in the order of their progress."""
        async with contextlib.aclosing(self.pieces(inputs, stream=True)) as pieces:
            async for piece in pieces:
                output = piece.answer.to_dict()
                yield {**output, "index": piece.index} if inputs.batched else output

    async def pieces(self, inputs: Inputs, *, stream: bool) -> AsyncGenerator[Piece, None]:
        """News of the answers in the order of their progress; with `stream` off each answer is one piece.

        The reader pulls: however long it stays away, it then finds each answer once, as far as it has come. Closing
        the generator aborts what still runs. A lone request that is refused before it has shown anything raises; in a
        batch its last piece carries the reason.
        """
        answers, news = self._submit(inputs, stream=stream)
        try:
            unfinished = len(answers)
            while unfinished:
                answer = await news.next()
                if not answer.done and not stream:
                    continue
                piece = answer.take()
                unfinished -= piece.finish is not None  # before the yield: more may come during the reader's turn
                if piece.finish is not None and not inputs.batched and not (stream and answer.new_tokens):
                    raise_if_refused(answer)
                yield piece
        finally:
            self._release(answers)
            for watcher in self._watchers if inputs.watched else ():
                for answer in answers:
                    watcher.ended(answer)

    async def flush_cache(self) -> Reply:
        return await self._call(FlushCache)

    async def state(self) -> Reply:
        return await self._call(GetState)

    async def ping(self) -> Reply:
        """Comes back when every process on the way of a request has had its turn."""
        return await self._call(Ping)

    async def pause(self, mode: PauseMode) -> Reply:
        return await self._call(lambda call: Pause(call, mode))

    async def resume(self) -> Reply:
        return await self._call(Resume)

    async def start_profile(self, **options: Any) -> Reply:
        return await self._call(lambda call: StartProfile(call=call, **options))

    async def stop_profile(self) -> Reply:
        return await self._call(StopProfile)

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Ends the request with this id (with n > 1 all its samples, in a batch all its prompts), or all of them, those
        of the engine's other clients too."""
        if self._death is None:
            self._scheduler.send(Abort() if abort_all else Abort(name=rid))

    # What the engine's side uses --------------------------------------------------------------------------------------

    def receive(self, message: ToClient) -> None:
        match message:
            case Deltas():
                if any(delta.ids for delta in message.items):  # a refusal is no sign that tokens are made
                    self.heard_at = time.monotonic()
                now = time.perf_counter()
                for replay in message.replays:
                    if (resumed := self._answers.get(replay.handle)) is not None:
                        resumed.recall(replay)
                for delta in message.items:
                    answer = self._answers.get(delta.handle)
                    if answer is not None:  # else its caller has left
                        answer.add(delta, now)
            case Reply():
                future = self._calls.pop(message.call, None)
                if future is not None and not future.done():
                    future.set_result(message)
            case _:
                assert_never(message)

    def die(self, error: EngineDeadError) -> None:
        """The engine has ended: everyone who waits is told, and so is everyone who comes later."""
        self._death = error
        for answer in self._answers.values():
            answer.fail(error)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    # ------------------------------------------------------------------------------------------------------------------

    def _submit(self, inputs: Inputs, *, stream: bool) -> tuple[list[Answer], News]:
        if self._death is not None:
            raise self._death
        self._refuse_used_rids(inputs)
        news = News()
        answers = [
            Answer(next(self._handles), index, prompt, self._tokenizer, news, self.meter if inputs.watched else None)
            for index, prompt in enumerate(inputs.prompts)
        ]
        # Nothing can come back before this loop gets its turn again, so only what was sent needs to be known.
        self._scheduler.send(*(_generate_message(answer.handle, answer.prompt, stream) for answer in answers))
        self._answers |= {answer.handle: answer for answer in answers}
        self._rids |= {answer.prompt.rid: answer for answer in answers}
        for watcher in self._watchers if inputs.watched else ():
            for answer in answers:
                watcher.arrived(answer)
        return answers, news

    def _refuse_used_rids(self, inputs: Inputs) -> None:
        seen: set[str] = set()
        for prompt in inputs.prompts:
            if prompt.resumption is not None:
                continue  # it keeps its id; the stream that broke may not have been noticed here yet
            user = self._rids.get(prompt.rid)
            if prompt.rid in seen or (user is not None and not user.done):
                raise RequestError(f"rid {prompt.rid!r} is in use by another request; choose another.", field="rid")
            seen.add(prompt.rid)

    def _release(self, answers: Sequence[Answer]) -> None:
        """Forgets answers; those still running are aborted, because nobody waits for them any more."""
        for answer in answers:
            del self._answers[answer.handle]
            if self._rids.get(answer.prompt.rid) is answer:
                del self._rids[answer.prompt.rid]
            if not answer.done and self._death is None:
                self._scheduler.send(Abort(answer.handle))
                answer.leave()

    async def _call(self, command: Callable[[int], Command]) -> Reply:
        if self._death is not None:
            raise self._death
        call = next(self._handles)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        try:
            self._scheduler.send(command(call))
            return await future
        finally:
            self._calls.pop(call, None)


def _generate_message(handle: int, prompt: Prompt, stream: bool) -> Generate:
    return Generate(
        handle=handle,
        rid=prompt.rid,
        input_ids=prompt.ids.tobytes(),
        sampling=prompt.sampling,
        seed=prompt.seed,
        namespace=prompt.namespace,
        priority=prompt.priority,
        logprobs=prompt.logprobs,
        stream=stream,
        names=tuple(sorted(prompt.names - {prompt.rid})),
        output_ids=b"" if prompt.resumption is None else prompt.resumption.output_ids.tobytes(),
        thinking=prompt.thinking,
        custom_logit_processor=prompt.processor,
    )


def raise_if_refused(answer: Answer) -> None:
    """Turns a refusal into the error that its caller gets."""
    refusal = answer.refusal
    if refusal is not None:
        raise refusal.to_error()
