"""Routing policies against stand-in engines in virtual time: hours of traffic in seconds, the same figures every time.

A stand-in's cache is the engine's own (`RadixTree` over a `PagePool`, with its eviction and events). Its time follows
from a few numbers (`Costs`): prompts are prefilled one after the other, as on one device; decodes run beside them and
slow each other. A token is four characters. The clock jumps from event to event; requests, cache events and learned
prompts take the time on their way that they would take on a network, so a policy knows nothing too early.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from bough.core.gateway_settings import GatewaySettings
from bough.core.plan import IntArray
from bough.gateway.policies import RoutingRequest, WorkerView, build_policy
from bough.gateway.policies.kv_events import KVEventsPolicy
from bough.memory.tree.events import KVEvent
from bough.memory.tree.node import Node
from bough.memory.tree.pool import PagePool
from bough.memory.tree.tree import RadixTree
from tests.fakes.routing import Snapshot

TOKEN_CHARS = 4
PAGE_TOKENS = 16
EVENT_DELAY_S = 0.001  # until a published event is known to the gateway
LEARN_DELAY_S = 0.005  # until a worker has tokenised a prompt for the gateway
REPORT_S = 1.0  # between two reports of a worker's load


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, and how long the answer will be."""

    text: str
    output_tokens: int


# What one user sends; each turn's prompt is everything said before, answers included, and the turn's own text.
Dialogue = tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """One request that was answered."""

    worker: str
    prompt_tokens: int
    cached_tokens: int
    expected_cached: float | None  # the share that the policy expected; None where it cannot be seen from outside
    output_tokens: int
    sent_s: float
    first_s: float  # from sending to the first token
    total_s: float


def tokenize(text: str) -> IntArray:
    """Token ids of a text: four characters each; the last is filled up."""
    raw = text.encode("latin-1", "replace")
    return np.frombuffer(raw + b" " * (-len(raw) % TOKEN_CHARS), dtype=np.int32) & 0x7FFFFFFF


def answer_text(request: int, tokens: int) -> str:
    """What a stand-in answers: `tokens` tokens that no other request is answered with."""
    return "".join(f"{(request * 7919 + token) % 9973:04d}" for token in range(tokens))


@dataclass(frozen=True, slots=True)
class Costs:
    """How fast an engine is, and how much it remembers."""

    prefill_us: float = 100.0  # per token that is not cached
    decode_ms: float = 10.0  # per token of an answer
    crowd_ms: float = 0.1  # added to that by each other answer that is made at the same time
    cache_tokens: int = 65_536

    @property
    def tokens_per_s(self) -> float | None:
        return 1e6 / self.prefill_us if self.prefill_us else None


@dataclass(frozen=True, slots=True)
class Running:
    """A request in progress: how much of its prompt was cached, and what of the cache it holds."""

    prompt_tokens: int
    cached_tokens: int
    node: Node


class EngineModel:
    """Owns the cache of one stand-in."""

    def __init__(self, costs: Costs, on_event: Callable[[KVEvent], None] | None = None) -> None:
        self._costs = costs
        self._running = 0
        self._pool = PagePool(max(1, costs.cache_tokens // PAGE_TOKENS))
        self._tree = RadixTree(PAGE_TOKENS, on_event=on_event)

    def begin(self, prompt: IntArray) -> Running:
        """The prompt's prefill starts: its prefix is held, the rest enters the cache as far as there is room."""
        held = self._tree.match(prompt)
        self._tree.lock(held.node)
        node = self._remember(prompt, held.node)
        self._running += 1
        return Running(len(prompt), held.length, node)

    def _remember(self, tokens: IntArray, locked: Node) -> Node:
        """Caches the whole pages of `tokens`, and moves the lock there; without room all stays as it is."""
        whole = tokens[: len(tokens) // PAGE_TOKENS * PAGE_TOKENS]
        missing = (len(whole) - self._tree.match_length(whole)) // PAGE_TOKENS
        if missing > self._pool.free:
            self._pool.give(self._tree.evict(missing - self._pool.free))
        if missing > self._pool.free or len(whole) == 0:
            return locked
        known = self._tree.match(whole)
        pages = np.concatenate([known.pages, self._pool.take(missing)])
        node = self._tree.insert(whole, pages).node
        self._tree.lock(node)
        self._tree.unlock(locked)
        return node

    def prefill_s(self, running: Running) -> float:
        return (running.prompt_tokens - running.cached_tokens) * self._costs.prefill_us * 1e-6

    def decode_s(self, tokens: int) -> float:
        """How long an answer takes, with as many others beside it as there are at its start."""
        return tokens * (self._costs.decode_ms + self._costs.crowd_ms * (self._running - 1)) * 1e-3

    def finish(self, running: Running, prompt_and_answer: IntArray) -> None:
        """The answer is complete: it stays cached behind its prompt, and nothing is held any more."""
        self._running -= 1
        self._tree.unlock(self._remember(prompt_and_answer, running.node))


# ---- virtual time


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
        self.gateway = 0
        self.expected = 0.0
        self.prefill_tokens = 0.0  # that the policy expects to be computed
        self.prompt: IntArray = tokenize(text)
        self.running: Running
        self.first_s = 0.0


class SimulatedWorker:
    """One stand-in engine: prompts one after the other, answers beside them."""

    def __init__(self, name: str, costs: Costs, clock: Clock, on_event: Callable[[str, KVEvent], None]) -> None:
        self.name = name
        self.load = 0
        self._own: Counter[int] = Counter()  # requests of each gateway process
        self._tokens: dict[int, float] = defaultdict(float)  # prompt tokens of those that have no first token
        self._others: dict[int, float] = defaultdict(float)  # what each process knows of the others' requests
        self._speeds: dict[int, float | None] = {}  # what each process knows of its speed
        self._clock = clock
        self._model = EngineModel(costs, partial(on_event, name))
        self._waiting: deque[Job] = deque()
        self._prefilling = False
        self._speed: float | None = None  # as an engine reports it: nothing before the first prompt is computed
        self._costs = costs

    def view(self, gateway: int) -> WorkerView:
        """As one process of the gateway sees it."""
        own, others = self._own[gateway], self._others[gateway]
        speed = self._speeds.get(gateway)
        return Snapshot(self.name, f"http://{self.name}", own, own + others, others, self._tokens[gateway], speed)

    def report(self, gateway: int) -> None:
        self._others[gateway] = self.load - self._own[gateway]
        self._speeds[gateway] = self._speed

    def take(self, job: Job) -> None:
        self.load += 1
        self._own[job.gateway] += 1
        self._tokens[job.gateway] += job.prefill_tokens
        self._waiting.append(job)
        if not self._prefilling:
            self._prefill()

    def _prefill(self) -> None:
        job = self._waiting.popleft()
        self._prefilling = True
        job.running = self._model.begin(job.prompt)
        self._clock.after(self._model.prefill_s(job.running), partial(self._prefilled, job))

    def _prefilled(self, job: Job) -> None:
        job.first_s = self._clock.now_s - job.sent_s
        self._speed = self._costs.tokens_per_s
        self._tokens[job.gateway] -= job.prefill_tokens
        self._clock.after(self._model.decode_s(job.output_tokens), partial(self._finished, job))
        self._prefilling = False
        if self._waiting:
            self._prefill()

    def _finished(self, job: Job) -> None:
        self._model.finish(job.running, tokenize(job.text + answer_text(job.number, job.output_tokens)))
        self.load -= 1
        self._own[job.gateway] -= 1
        job.ended(job)


class Simulation:
    """One policy, its workers and `users` users who each wait for an answer before they send on. Requests are dealt to
    `processes` processes of the gateway. With `added_at_s` the last worker joins at that time."""

    def __init__(
        self,
        policy: str,
        workers: int,
        costs: Costs,
        users: int,
        seed: int = 1,
        processes: int = 1,
        added_at_s: float = 0.0,
    ) -> None:
        self._clock = Clock()
        options = GatewaySettings(policy=policy, processes=processes).options_of(policy)
        self._policies = [build_policy(policy, seed=seed + number, **options) for number in range(processes)]
        self._observers = [each for each in self._policies if isinstance(each, KVEventsPolicy)]
        self._costs = costs
        self._workers: dict[str, SimulatedWorker] = {}
        for _ in range(workers - 1):
            self._add_worker()
        self._clock.after(added_at_s, self._add_worker)
        if added_at_s == 0.0:
            self._clock.run(lambda: len(self._workers) < workers)
        self._dealt = random.Random(seed)
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

    # ---- users

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
        prompt, cached = job.running.prompt_tokens, job.running.cached_tokens
        times = job.sent_s, job.first_s, self._clock.now_s - job.sent_s
        self._served.append(Served(job.worker, prompt, cached, job.expected, job.output_tokens, *times))

    # ---- the gateway

    def _add_worker(self) -> None:
        name = f"worker-{len(self._workers)}"
        self._workers[name] = SimulatedWorker(name, self._costs, self._clock, self._published)

    def _send(self, job: Job) -> None:
        request = RoutingRequest(model="simulated", text=job.text, token_ids=None, session=None, target=None)
        job.gateway = self._dealt.randrange(len(self._policies))
        policy = self._policies[job.gateway]
        choice = policy.choose([worker.view(job.gateway) for worker in self._workers.values()], request)
        job.worker, job.expected, job.prefill_tokens = choice.worker_id, choice.expected_cached, choice.prefill_tokens
        policy.routed(choice.worker_id, request)
        if isinstance(policy, KVEventsPolicy) and policy.curious(request):
            self._clock.after(LEARN_DELAY_S, partial(policy.learn, job.text, job.prompt.tolist()))
        self._workers[choice.worker_id].take(job)

    def _published(self, worker: str, event: KVEvent) -> None:
        for observer in self._observers:
            self._clock.after(EVENT_DELAY_S, partial(observer.observe, worker, event))

    def _tick(self) -> None:
        for number, policy in enumerate(self._policies):
            policy.tick(self._clock.now_s)
            for worker in self._workers.values():
                worker.report(number)
        self._clock.after(REPORT_S, self._tick)
