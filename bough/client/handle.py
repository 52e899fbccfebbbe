"""The client's side of an engine: gives requests handles, sends them, and brings each delta to its answer.

Owns the open answers. All of it happens on one event loop; other threads come in through that loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, assert_never

from bough.client.answer import Answer
from bough.client.inputs import Inputs, Prompt
from bough.core.errors import EngineDeadError, RequestError
from bough.messages.outputs import Deltas, Reply, ToClient
from bough.messages.requests import Abort, FlushCache, Generate, GetState
from bough.tokenizer.tokenizer import Tokenizer


class SchedulerPort(Protocol):
    """The way to the scheduler."""

    def send(self, message: Generate | Abort | FlushCache | GetState) -> None: ...


class EngineClient:
    """Submit, stream, abort, control."""

    def __init__(self, scheduler: SchedulerPort, tokenizer: Tokenizer | None) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._handles = itertools.count(1)
        self._answers: dict[int, Answer] = {}
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._death: EngineDeadError | None = None

    # What callers use -------------------------------------------------------------------------------------------------

    async def generate(self, inputs: Inputs) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole answer. A lone request that the engine refuses raises; in a batch it carries its reason."""
        answers = self._submit(inputs, stream=False)
        try:
            for answer in answers:
                while not answer.done:
                    await answer.progress()
                if answer.error is not None and answer.finish is None:
                    raise answer.error
        finally:
            self._release(answers)
        if inputs.batched:
            return [answer.to_dict() for answer in answers]
        _raise_if_refused(answers[0])
        return answers[0].to_dict()

    async def stream(self, inputs: Inputs) -> AsyncIterator[dict[str, Any]]:
        """Cumulative outputs as they grow; those of a batch carry `index` and come in the order of their progress."""
        answers = self._submit(inputs, stream=True)
        try:
            if not inputs.batched:
                async for output in self._stream_one(answers[0]):
                    yield output
                return
            ready: asyncio.Queue[tuple[int, dict[str, Any] | Exception | None]] = asyncio.Queue()
            pumps = [asyncio.create_task(_pump(i, a, self._stream_one(a), ready)) for i, a in enumerate(answers)]
            try:
                open_streams = len(answers)
                while open_streams:
                    index, item = await ready.get()
                    if item is None:
                        open_streams -= 1
                    elif isinstance(item, Exception):
                        raise item
                    else:
                        yield {**item, "index": index}
            finally:
                for pump in pumps:
                    pump.cancel()
        finally:
            self._release(answers)

    async def flush_cache(self) -> Reply:
        return await self._call(FlushCache)

    async def state(self) -> Reply:
        return await self._call(GetState)

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Ends the request with this id (with n > 1, all its samples), or all of them."""
        for answer in list(self._answers.values()):
            own = answer.prompt.rid
            if abort_all or own == rid or own.startswith(f"{rid}-"):
                self._scheduler.send(Abort(answer.handle))

    # What the engine's side uses --------------------------------------------------------------------------------------

    def receive(self, message: ToClient) -> None:
        match message:
            case Deltas():
                for delta in message.items:
                    answer = self._answers.get(delta.handle)
                    if answer is not None:  # else its caller has left
                        answer.add(delta)
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

    def _submit(self, inputs: Inputs, *, stream: bool) -> list[Answer]:
        if self._death is not None:
            raise self._death
        answers = []
        for prompt in inputs.prompts:
            answer = Answer(next(self._handles), prompt, self._tokenizer)
            self._answers[answer.handle] = answer
            self._scheduler.send(_generate_message(answer.handle, prompt, stream))
            answers.append(answer)
        return answers

    async def _stream_one(self, answer: Answer) -> AsyncIterator[dict[str, Any]]:
        while True:
            await answer.progress()
            finished = answer.finish is not None  # before the yield: more may arrive while the reader has its turn
            if finished and not answer.ids:
                _raise_if_refused(answer)
            yield answer.to_dict()
            if finished:
                return

    def _release(self, answers: Sequence[Answer]) -> None:
        """Forgets answers; those still running are aborted, because nobody waits for them any more."""
        for answer in answers:
            del self._answers[answer.handle]
            if not answer.done and self._death is None:
                self._scheduler.send(Abort(answer.handle))

    async def _call(self, message: type[FlushCache] | type[GetState]) -> Reply:
        if self._death is not None:
            raise self._death
        call = next(self._handles)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        self._scheduler.send(message(call))
        return await future


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
    )


def _raise_if_refused(answer: Answer) -> None:
    refusal = answer.refusal
    if refusal is not None:
        raise RequestError(refusal.message, status_code=refusal.status_code, err_type=refusal.err_type)


async def _pump(
    index: int,
    answer: Answer,
    outputs: AsyncIterator[dict[str, Any]],
    ready: asyncio.Queue[tuple[int, dict[str, Any] | Exception | None]],
) -> None:
    """Moves one stream of a batch into the common queue. A refused one shows its reason as its last output."""
    try:
        async for output in outputs:
            await ready.put((index, output))
    except RequestError:
        await ready.put((index, answer.to_dict()))
    except EngineDeadError as error:
        await ready.put((index, error))
    await ready.put((index, None))
