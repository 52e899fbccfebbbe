"""A whole engine in one process without a model: client, scheduler and detokenizer are real, the executor is a fake
whose tokens depend on everything that a real one may look at (what is read through the pages, the seed and the output
position, the history for penalties, what must not be sampled yet). Tokens are bytes, often of half characters."""

from __future__ import annotations

import asyncio
import dataclasses
import zlib
from typing import Any

import msgspec
import numpy as np

from bough.client.handle import EngineClient
from bough.client.inputs import InputReader
from bough.client.replicas import Replicas
from bough.core.errors import EngineDeadError
from bough.core.plan import BatchPlan, Limits, PositionLogprobs, RowSetup, StepResult
from bough.core.settings import MemorySettings, SchedulerSettings, Settings
from bough.messages.outputs import Deltas, Reply, ToClient, ToDetokenizer
from bough.messages.requests import ProcessCommand, StreamEnded, ToScheduler
from bough.scheduler.loop import Scheduler
from bough.scheduler.ports import Grammars
from bough.server.context import ServerContext
from bough.server.model_info import ModelInfo
from bough.tokenizer.detokenizer import Detokenizer
from tests.fakes.boxes import FakeInbox
from tests.fakes.executor import Done, FakeExecutor
from tests.fakes.scripted_engine import IM_END, byte_level_tokenizer

VOCAB = 258
SPOKEN = [*(b"ab " * 6), *"é😀".encode(), *b'\n"\\E', IM_END]  # what the fake model likes to say


class ChoosyExecutor(FakeExecutor):
    """Chooses as a sampler would: by its row's parameters and by how many tokens the row has generated."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self._setups: dict[int, RowSetup] = {}
        self._generated: dict[int, list[int]] = {}
        self.setups: list[RowSetup] = []  # all that came

    def limits(self) -> Limits:
        return dataclasses.replace(super().limits(), vocab_size=VOCAB)

    def launch(self, plan: BatchPlan) -> Done:
        for setup in plan.setups:
            self._setups[setup.row] = setup
            history = [] if setup.history is None else setup.history[setup.prompt_len :].tolist()
            self._generated[setup.row] = history or [-1] * setup.generated
            self.setups.append(setup)
        done = super().launch(plan)
        return Done(dataclasses.replace(done.result, output_logprobs=self._logprobs(plan, done.result)))

    def next_token(self, row: int, sequence: np.ndarray, allowed: np.ndarray | None = None) -> int:
        assert allowed is None, "this engine speaks freely"
        setup, generated = self._setups[row], self._generated[row]
        facts: list[Any] = [sequence.tolist()]
        if not setup.sampling.greedy:
            facts.append((setup.seed, len(generated)))
        if setup.sampling.penalised:
            facts.append(sorted(generated))
        choice = zlib.crc32(repr(facts).encode())
        words: list[int] = [
            w for w in SPOKEN if len(generated) >= setup.sampling.min_new_tokens or w not in setup.stop_ids
        ]
        token = words[choice % len(words)]
        generated.append(token)
        return token

    def _logprobs(self, plan: BatchPlan, result: StepResult) -> dict[int, PositionLogprobs]:
        """The "logprob" of a token is minus an eighth of its value."""
        found = {}
        indexes = np.flatnonzero(plan.sample).tolist()
        for index, token in zip(indexes, result.tokens[:, 0].tolist(), strict=True):
            wanted = self._setups[int(plan.rows[index])].logprobs
            if wanted is not None:
                tops = np.arange(wanted.top, dtype=np.int32).reshape(1, -1)
                value = (np.array([token]) / -8).astype(np.float32)
                found[index] = PositionLogprobs(
                    np.array([token], dtype=np.int32),
                    value,
                    (tops / -8).astype(np.float32),
                    tops,
                    np.zeros((1, 0), np.float32),
                )
        return found


class WholeEngine:
    """Runs as long as there is work, `turns` of the loop between two turns of the event loop."""

    def __init__(
        self,
        *,
        turns: int = 1,
        stream_interval: int = 1,
        seed: int | None = None,
        grammars: Grammars | None = None,
        **options: Any,
    ) -> None:
        sizes = {name: options.pop(name) for name in ("page_size", "chunk_tokens") if name in options}
        sizes["chunk_tokens"] = max(sizes.get("chunk_tokens", 16), sizes.get("page_size", 1))
        self.executor = ChoosyExecutor(pages=1024 // sizes.get("page_size", 1), context_length=256, **sizes)
        self.tokenizer = byte_level_tokenizer()
        self.inbox = FakeInbox()
        settings = SchedulerSettings(**options)
        self.scheduler = Scheduler(
            self.executor,
            self.inbox,
            self,
            memory=MemorySettings(),
            settings=settings,
            eos_ids=(IM_END,),
            grammars=grammars,
        )
        self.detokenizer = Detokenizer(self.tokenizer, self, stream_interval)
        self.client = EngineClient(Replicas([self]), self.tokenizer)
        self.reader = InputReader(self.tokenizer, {}, random_seed=seed)
        self._turns = turns
        self._pumping = False

    def context(self, **settings: Any) -> ServerContext:
        model = ModelInfo("tiny", "/models/tiny", "/models/tiny", "LlamaForCausalLM", 256, VOCAB, 1_700_000_000)
        return ServerContext(self.client, self.reader, self.tokenizer, model, Settings.from_flat(settings))

    # The client's way in, the scheduler's way out, and the detokenizer's ----------------------------------------------

    def send(self, *messages: ToScheduler) -> None:
        self.inbox.pending += messages
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def tokens(self, message: ToDetokenizer) -> None:
        self.detokenizer.handle(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToDetokenizer))

    def deltas(self, message: Deltas) -> None:
        self.client.receive(msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToClient))

    def stream_ended(self, message: StreamEnded) -> None:
        self.inbox.pending.append(message)

    def reply(self, message: Reply) -> None:
        self.client.receive(message)

    def tell_clients(self, message: ProcessCommand) -> None:
        self.client.receive(message)

    def _pump(self) -> None:
        try:
            for _ in range(self._turns):
                self.scheduler.turn()
        except Exception as error:  # nobody else would be told of it
            self.client.die(EngineDeadError(repr(error)))
            raise
        self._pumping = bool(self.inbox.pending or self.scheduler._requests or self.scheduler._in_flight)
        if self._pumping:
            asyncio.get_running_loop().call_soon(self._pump)
