"""Policies against stand-in engines in virtual time: hours of traffic in seconds, the same figures every time.

Owns the clock, which jumps from event to event. Requests, cache events and learned prompts take the time on their way
that they would take on a network, so a policy knows neither more nor earlier than behind a real gateway.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bough.bench.gateway_figures import Served
from bough.bench.gateway_loads import Dialogue
from bough.bench.gateway_model import Costs, EngineModel, Seat, answer_text, tokenize
from bough.core.plan import IntArray
from bough.gateway.policies import RoutingRequest, WorkerView, build_policy
from bough.gateway.policies.kv_events import KVEventsPolicy
from bough.memory.tree import KVEvent

EVENT_DELAY_S = 0.001  # until a published event is known to the gateway
LEARN_DELAY_S = 0.005  # until a worker has tokenised a prompt for the gateway


class Clock:
    """Virtual time and what is to happen in it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._coming, (self.now_s + delay_s, next(self._order), do))

    def run(self, busy: Callable[[], bool]) -> None:
        while self._coming and busy():
            self.now_s, _, do = heapq.heappop(self._coming)
            do()


class Job:
    """A request on its way through a worker."""

    def __init__(self, number: int, text: str, output_tokens: int, sent_s: float, ended: Callable[[Job], None]) -> None:
        self.number = number
        self.text = text
        self.output_tokens = output_tokens
        self.sent_s = sent_s
        self.ended = ended
        self.worker = ""
        self.expected = 0.0
        self.prompt: IntArray = tokenize(text)
        self.seat: Seat
        self.first_s = 0.0


class SimulatedWorker:
    """One stand-in engine: prompts one after the other, answers beside them."""

    def __init__(self, name: str, costs: Costs, clock: Clock, on_event: Callable[[str, KVEvent], None]) -> None:
        self.name = name
        self.load = 0
        self._clock = clock
        self._model = EngineModel(costs, partial(on_event, name))
        self._waiting: deque[Job] = deque()
        self._prefilling = False

    def view(self) -> WorkerView:
        return WorkerView(self.name, f"http://{self.name}", self.load, 0.0, None)

    def take(self, job: Job) -> None:
        self.load += 1
        self._waiting.append(job)
        if not self._prefilling:
            self._prefill()

    def _prefill(self) -> None:
        job = self._waiting.popleft()
        self._prefilling = True
        job.seat = self._model.begin(job.prompt)
        self._clock.after(self._model.prefill_s(job.seat), partial(self._prefilled, job))

    def _prefilled(self, job: Job) -> None:
        job.first_s = self._clock.now_s - job.sent_s
        self._clock.after(self._model.decode_s(job.output_tokens), partial(self._finished, job))
        self._prefilling = False
        if self._waiting:
            self._prefill()

    def _finished(self, job: Job) -> None:
        self._model.finish(job.seat, tokenize(job.text + answer_text(job.number, job.output_tokens)))
        self.load -= 1
        job.ended(job)


class Simulation:
    """One policy, its workers and `users` users who each wait for an answer before they send on."""

    def __init__(self, policy: str, workers: int, costs: Costs, users: int, seed: int = 1) -> None:
        self._clock = Clock()
        self._policy = build_policy(policy, seed=seed)
        inner = self._policy.policy
        self._observer = inner if isinstance(inner, KVEventsPolicy) else None
        self._workers = {
            name: SimulatedWorker(name, costs, self._clock, self._published)
            for name in (f"worker-{number}" for number in range(workers))
        }
        self._users = users
        self._numbers = itertools.count()
        self._served: list[Served] = []

    def run(self, dialogues: Sequence[Dialogue]) -> list[Served]:
        total = sum(map(len, dialogues))
        waiting = iter(dialogues)
        for _ in range(self._users):
            self._next_dialogue(waiting)
        self._tick()
        self._clock.run(lambda: len(self._served) < total)
        return self._served

    # -- users --------------------------------------------------------------------------------------------------------

    def _next_dialogue(self, waiting: Iterator[Dialogue]) -> None:
        dialogue = next(waiting, None)
        if dialogue is not None:
            self._say(dialogue, 0, "", waiting)

    def _say(self, dialogue: Dialogue, turn: int, history: str, waiting: Iterator[Dialogue]) -> None:
        def ended(job: Job) -> None:
            self._record(job)
            if turn + 1 < len(dialogue):
                answer = answer_text(job.number, job.output_tokens)
                self._say(dialogue, turn + 1, job.text + answer, waiting)
            else:
                self._next_dialogue(waiting)

        said = dialogue[turn]
        self._send(Job(next(self._numbers), history + said.text, said.output_tokens, self._clock.now_s, ended))

    def _record(self, job: Job) -> None:
        total_s = self._clock.now_s - job.sent_s
        seat = job.seat
        self._served.append(
            Served(
                worker=job.worker,
                prompt_tokens=seat.prompt_tokens,
                cached_tokens=seat.cached_tokens,
                expected_cached=job.expected,
                output_tokens=job.output_tokens,
                sent_s=job.sent_s,
                first_s=job.first_s,
                total_s=total_s,
            )
        )

    # -- the gateway --------------------------------------------------------------------------------------------------

    def _send(self, job: Job) -> None:
        request = RoutingRequest(model="simulated", text=job.text, token_ids=None, session=None, target=None)
        choice = self._policy.choose([worker.view() for worker in self._workers.values()], request)
        job.worker, job.expected = choice.worker_id, choice.expected_cached
        self._policy.routed(choice.worker_id, request)
        if self._observer is not None and self._observer.curious(request):
            self._clock.after(LEARN_DELAY_S, partial(self._observer.learn, job.text, job.prompt.tolist()))
        self._workers[choice.worker_id].take(job)

    def _published(self, worker: str, event: KVEvent) -> None:
        if self._observer is not None:
            self._clock.after(EVENT_DELAY_S, partial(self._observer.observe, worker, event))

    def _tick(self) -> None:
        self._policy.tick(self._clock.now_s)
        self._clock.after(1.0, self._tick)
