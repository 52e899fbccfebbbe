"""The client's side of an engine: sends requests, and brings each delta to its answer. Lives on one event loop."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol, assert_never

from msgspec import structs

from bough.client.inputs import Inputs, Prompt
from bough.client.outputs import Piece, RequestOutput, UpdateQueue
from bough.client.replicas import Replicas, merge_replies
from bough.core import control
from bough.core.errors import EngineDeadError, RequestError
from bough.core.media import MediaKind
from bough.core.sampling_params import require_name
from bough.messages.channels import first_handle
from bough.messages.outputs import Deltas, ReplicaLost, Reply, ToClient
from bough.messages.requests import Abort, ChangeSession, Command, Control, Generate, GetState, Ping, ProcessCommand
from bough.multimodal.sources import FIELDS, PLURALS
from bough.observability.metrics import State
from bough.observability.request_meter import RequestMeter
from bough.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bough.multimodal.preparer import MediaPreparer


class RequestWatcher(Protocol):
    """Called in the request's own context, so logs and traces carry its id."""

    def arrived(self, answer: RequestOutput) -> None:
        """It was sent to the engine."""

    def ended(self, answer: RequestOutput) -> None:
        """Its caller has all of it, or has disconnected (then it is not `done`)."""


class EngineClient:
    def __init__(
        self,
        replicas: Replicas,
        tokenizer: Tokenizer | None,
        number: int = 0,
        *,
        meter: RequestMeter | None = None,
        watchers: Sequence[RequestWatcher] = (),
        turn: Callable[[], AbstractAsyncContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        """`number` identifies this client among those of one engine. The watchers are notified of all requests. `turn`
        keeps the engine's other clients from sending commands to executors: all replicas get them in one order."""
        self._replicas = replicas
        self._tokenizer = tokenizer
        self._handles = itertools.count(first_handle(number))
        self._answers: dict[int, RequestOutput] = {}
        self._rids: dict[str, RequestOutput] = {}  # the latest with each id
        self._death: EngineDeadError | None = None
        self._watchers = watchers
        self._turn = turn
        self.meter = meter or RequestMeter()
        self.media_kinds: frozenset[MediaKind] = frozenset()  # what the model takes beside text
        self.preparer: MediaPreparer | None = None  # of such a model
        self.last_output_at = time.monotonic()  # when the last tokens arrived
        self.on_command: Callable[[ProcessCommand], None] = lambda command: None  # one for all processes has come

    # What callers use -------------------------------------------------------------------------------------------------

    async def generate(self, inputs: Inputs) -> dict[str, Any] | list[dict[str, Any]]:
        """The whole answer. A lone request that the engine refuses raises; in a batch it carries its reason."""
        pieces = self.pieces(inputs, stream=False)
        outputs = {piece.index: piece.answer.to_dict() async for piece in pieces}  # while others are still computed
        return [outputs[index] for index in range(len(outputs))] if inputs.batched else outputs[0]

    async def answers(self, inputs: Inputs) -> list[RequestOutput]:
        pieces = self.pieces(inputs, stream=False)
        return sorted([piece.answer async for piece in pieces], key=lambda answer: answer.index)

    async def stream(self, inputs: Inputs) -> AsyncGenerator[dict[str, Any], None]:
        """Cumulative outputs as they grow; those of a batch carry `index` and come in the order of their progress."""
        async with contextlib.aclosing(self.pieces(inputs, stream=True)) as pieces:
            async for piece in pieces:
                output = piece.answer.to_dict()
                yield {**output, "index": piece.index} if inputs.batched else output

    async def pieces(self, inputs: Inputs, *, stream: bool) -> AsyncGenerator[Piece, None]:
        """The answers' output in the order in which it arrives; with `stream` off each answer is one piece.

        The reader pulls: a slow one finds each answer once, with everything since its last piece. Closing the generator
        aborts what still runs. A single request that is refused before its first output raises; in a batch the last
        piece carries the reason.
        """
        prepared = await self.prepared(inputs)
        answers, updates = list[RequestOutput](), UpdateQueue()
        try:
            self._submit(prepared, answers, updates, stream=stream)
            unfinished = len(answers)
            while unfinished:
                answer = await updates.get()
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

    async def prepared(self, inputs: Inputs) -> Inputs:
        """With the prompts that the engine is given: each item of their media has its place in the ids."""
        if not any(prompt.sources for prompt in inputs.prompts):
            return inputs
        return dataclasses.replace(inputs, prompts=tuple(await asyncio.gather(*map(self._with_media, inputs.prompts))))

    async def call(self, command: Callable[[int], Command]) -> Reply:
        """The engine's reply to a command, which is made with the number of the call: every replica gets it."""
        return merge_replies(await self._call_all(command))

    async def silent_replicas(self, timeout_s: float) -> list[int]:
        """Those that do not answer in time, though nobody has seen them die."""
        replies = await self._call_all(Ping, timeout_s)
        return [each.number for each in self._replicas.alive if each.number not in replies]

    async def states(self, timeout_s: float | None = None) -> list[State]:
        return await self.ask(GetState, timeout_s)

    async def ask(self, command: Callable[[int], Command], timeout_s: float | None = None) -> list[State]:
        """What every replica says that answers in time."""
        replies = await self._call_all(command, timeout_s)
        several = len(self._replicas.all) > 1
        return [{**reply.data, "dp_rank": rank} if several else reply.data for rank, reply in replies.items()]

    @property
    def replica_count(self) -> int:
        """Of those that live."""
        return len(self._replicas.alive)

    @property
    def dead_replicas(self) -> dict[str, str]:
        """Why each has died."""
        return {each.id: str(each.death) for each in self._replicas.all if each.death is not None}

    async def update_weights(
        self,
        command: control.WeightsCommand,
        *,
        flush_cache: bool | None = True,
        abort_all_requests: bool | None = False,
        weight_version: str | None = None,
    ) -> Reply:
        """Returns when the requests before it have ended and the weights are the others."""
        facts = {} if weight_version is None else {"weight_version": weight_version}
        if isinstance(command, control.SwapWeights):
            facts["model_path"] = command.model_path
        options = {"abort_all": bool(abort_all_requests), "flush_cache": flush_cache is not False}
        return merge_replies(await self._control(command, wait=True, facts=facts, **options))

    async def change_trainers(self, command: control.TrainerCommand) -> Reply:
        """Returns when the requests before it have ended, and the group is made or left."""
        return merge_replies(await self._control(command, wait=True))

    async def read_weight(self, command: control.ReadWeight) -> Reply:
        """Of one replica: all have the same."""
        return next(iter((await self._control(command, wait=True)).values()))

    async def release_memory(self, tags: Sequence[str] | None) -> Reply:
        command = control.Sleep(control.memory_tags(tags))
        return merge_replies(await self._control(command, flush_cache="kv_cache" in command.tags))

    async def resume_memory(self, tags: Sequence[str] | None) -> Reply:
        return merge_replies(await self._control(control.Wake(control.memory_tags(tags))))

    async def record_experts(self, action: Literal["start", "stop", "dump"]) -> Reply:
        """Returns when the requests before it have ended; with the choices of all replicas, if they are asked for."""
        replies = await self._control(control.RecordExperts(action), wait=True)
        reply = merge_replies(replies)
        if action != "dump" or not reply.ok:
            return reply
        layers = zip(*(json.loads(each.message) for each in replies.values()), strict=True)
        counts = [[sum(of_expert) for of_expert in zip(*of_layer, strict=True)] for of_layer in layers]
        return Reply(reply.call, True, data={"logical_count": counts})

    async def change_session(self, name: str | None, *, open: bool = True, timeout_s: float | None = None) -> Reply:
        """Opens a session, whose id is the reply, or closes it, in all replicas: each of its requests finds it."""
        chosen = name or uuid.uuid4().hex
        return await self.call(lambda call: ChangeSession(call, chosen, open, timeout_s))

    def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """Ends the request with this id (with n > 1 all its samples, in a batch all its prompts), or all of them, those
        of the engine's other clients too, and those whose media are still prepared."""
        require_name(rid, "rid")  # it is remembered
        if self._death is None:
            for replica in self._replicas.alive:
                replica.port.send(Abort(name=None if abort_all else rid, made_at=time.monotonic()))

    # What the engine's side uses --------------------------------------------------------------------------------------

    def receive(self, message: ToClient) -> None:
        match message:
            case Deltas():
                if any(delta.ids for delta in message.items):  # a refusal does not show that tokens are generated
                    self.last_output_at = time.monotonic()
                now = time.perf_counter()
                for replay in message.replays:
                    if (resumed := self._answers.get(replay.handle)) is not None:
                        resumed.replay(replay)
                for delta in message.items:
                    answer = self._answers.get(delta.handle)
                    if answer is not None:  # else its caller has disconnected
                        answer.add(delta, now)
                        if delta.finish is not None:
                            self._replicas.leave(answer)
                        elif delta.started is not None:
                            self._replicas.prefilled(answer)
            case Reply():
                for replica in self._replicas.all:
                    future = replica.calls.pop(message.call, None)
                    if future is not None and not future.done():
                        future.set_result(message)
            case ReplicaLost():
                self._lose(message.dp_rank, EngineDeadError(message.reason))
            case ProcessCommand():
                message.obey()
                self.on_command(message)
            case _:
                assert_never(message)

    def die(self, error: EngineDeadError) -> None:
        self._death = error
        for answer in self._answers.values():
            answer.fail(error)
        for replica in self._replicas.all:
            replica.end_calls(error)

    # ------------------------------------------------------------------------------------------------------------------

    async def _with_media(self, prompt: Prompt) -> Prompt:
        if not prompt.sources:
            return prompt
        if self.preparer is None:
            kind = prompt.sources[0].kind
            raise RequestError(f"This model takes no {PLURALS[kind]}; leave {FIELDS[kind]} out.", field=FIELDS[kind])
        found = await self.preparer.prepare(prompt.ids, prompt.sources)
        ids, plain = found.input_ids, found.plain_ids
        return structs.replace(prompt, ids=ids, plain_ids=plain, sources=(), media=found.media, held=found.items)

    def _submit(self, inputs: Inputs, answers: list[RequestOutput], updates: UpdateQueue, *, stream: bool) -> None:
        """The `answers` get those of the prompts that were sent, should one behind them be wrong."""
        meter = self.meter if inputs.metered else None
        rids: set[str] = set()
        for part, followed in inputs.parts():
            if self._death is not None:
                raise self._death
            for prompt in part:
                self._check(prompt, rids)
            added = [
                RequestOutput(next(self._handles), index, prompt, self._tokenizer, updates, meter)
                for index, prompt in enumerate(part, len(answers))
            ]
            self._send(added, stream=stream, followed=followed)
            answers += added
            self._rids |= {answer.prompt.rid: answer for answer in added}
            for watcher in self._watchers if inputs.watched else ():
                for answer in added:
                    watcher.arrived(answer)

    def _send(self, answers: Sequence[RequestOutput], *, stream: bool, followed: bool = False) -> None:
        """Sends each request to the replica that gets it: all of them or, where one cannot be sent, none."""
        shares: dict[int, list[RequestOutput]] = {}
        for answer in answers:
            answer.stream = stream
            self._replicas.place(answer)
            shares.setdefault(answer.dp_rank or 0, []).append(answer)
        sent: list[RequestOutput] = []
        try:
            for rank, share in shares.items():
                self._replicas.all[rank].port.send(*(_generate_message(answer, followed) for answer in share))
                sent += share
        except BaseException:
            for answer in sent:
                self._replicas.of(answer).port.send(Abort(answer.handle))
            for answer in answers:
                self._replicas.leave(answer)
            raise
        # Nothing can arrive before the event loop runs again, so registering after the send is early enough.
        self._answers |= {answer.handle: answer for answer in answers}

    def _lose(self, rank: int, error: EngineDeadError) -> None:
        """A replica has died. Requests of which nothing has come back begin again elsewhere, unless they chose it. Each
        does so once: it may be what the replica died of."""
        alive = [replica for replica in self._replicas.alive if replica.number != rank]
        for answer in self._replicas.lose(rank, error):
            if answer.started or answer.ids or answer.moved or answer.prompt.dp_rank is not None or not alive:
                answer.fail(error)
                continue
            del self._answers[answer.handle]
            answer.handle, answer.moved = next(self._handles), True  # nothing can still come from the dead one
            self._send([answer], stream=answer.stream)

    async def _control(self, command: control.ClientCommand, **options: Any) -> dict[int, Reply]:
        async with self._turn():
            return await self._call_all(lambda call: Control(call=call, command=command, **options))

    async def _call_all(self, command: Callable[[int], Command], timeout_s: float | None = None) -> dict[int, Reply]:
        """The reply of each replica, without those that die meanwhile or do not answer in time."""
        if self._death is not None:
            raise self._death
        futures: dict[int, asyncio.Future[Reply]] = {}
        alive, numbers = self._replicas.alive, []
        try:
            for replica in alive:
                numbers.append(next(self._handles))
                futures[replica.number] = asyncio.get_running_loop().create_future()
                replica.calls[numbers[-1]] = futures[replica.number]
                replica.port.send(sent := command(numbers[-1]))
            await asyncio.wait(futures.values(), timeout=timeout_s)
        finally:
            for replica, number in zip(alive, numbers, strict=False):
                replica.calls.pop(number, None)
        replies = {rank: each.result() for rank, each in futures.items() if each.done() and not each.exception()}
        if not replies and all(each.done() for each in futures.values()):
            next(iter(futures.values())).result()  # raises what they all died of
        if getattr(sent, "flush_cache", False):
            self._replicas.forget(rank for rank, reply in replies.items() if reply.ok)
        return replies

    def _check(self, prompt: Prompt, rids: set[str]) -> None:
        """`rids` are those of the call's prompts before it."""
        self._replicas.check(prompt)
        if prompt.resumption is not None:
            return  # it keeps its id, and the broken stream may still be open here
        user = self._rids.get(prompt.rid)
        if prompt.rid in rids:
            problem = f"Duplicate request IDs detected within the request: {prompt.rid!r}"
            raise RequestError(f"{problem}; give each prompt its own rid.", field="rid")
        if user is not None and not user.done:
            problem = f"Duplicate request ID detected: {prompt.rid!r} is the rid of a request that runs"
            raise RequestError(f"{problem}; choose another.", field="rid")
        rids.add(prompt.rid)

    def _release(self, answers: Sequence[RequestOutput]) -> None:
        for answer in answers:
            del self._answers[answer.handle]
            if self._rids.get(answer.prompt.rid) is answer:
                del self._rids[answer.prompt.rid]
            replica = self._replicas.of(answer)
            self._replicas.leave(answer)
            if not answer.done and self._death is None:
                replica.port.send(Abort(answer.handle))
                answer.abandon()


SHARED = tuple(name for name in Generate.__struct_fields__ if name in Prompt.__struct_fields__ and name != "names")


def _generate_message(answer: RequestOutput, followed: bool) -> Generate:
    prompt = answer.prompt
    return Generate(
        handle=answer.handle,
        input_ids=prompt.ids.tobytes(),
        stream=answer.stream,
        followed=followed,
        names=tuple(sorted(prompt.names - {prompt.rid})),
        output_ids=b"" if prompt.resumption is None else prompt.resumption.output_ids.tobytes(),
        **{name: getattr(prompt, name) for name in SHARED},
    )


def raise_if_refused(answer: RequestOutput) -> None:
    refusal = answer.refusal
    if refusal is not None:
        raise refusal.to_error()
