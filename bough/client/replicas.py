"""The schedulers of one engine, each with what this client has under way there, and which of them gets a request.

With one there is nothing to choose. With several (`--dp-size`) a policy of the gateway chooses. It sees the requests of
this client alone: of several HTTP processes each places by its own view.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bough.client.inputs import Prompt
from bough.client.outputs import RequestOutput
from bough.core.errors import EngineDeadError, RequestError
from bough.gateway.policies import RoutingRequest, build_policy
from bough.messages.channels import Sender
from bough.messages.outputs import Reply

CHARACTER_BITS = 0xFFFFF  # more than any vocabulary needs, and less than the last character
# The policies behind `--load-balance-method`.
POLICIES = {
    "auto": "cost",
    "round_robin": "round_robin",
    "total_requests": "least_loaded",
    "total_tokens": "least_loaded",
}


@dataclass(eq=False, slots=True)
class Replica:
    """One scheduler; to the policies it is a worker."""

    number: int
    port: Sender
    by_tokens: bool = False  # what its load counts, instead of requests
    death: EngineDeadError | None = None
    running: dict[int, RequestOutput] = field(default_factory=dict)  # requests that have not ended, by handle
    calls: dict[int, asyncio.Future[Reply]] = field(default_factory=dict)
    prefill_tokens: float = 0.0  # of the requests without a first token
    reported_load: float = 0.0
    other_load: float = 0.0
    speed: float | None = None
    id: str = ""
    url: str = ""

    def __post_init__(self) -> None:
        self.id = self.url = str(self.number)

    @property
    def load(self) -> int:
        if self.by_tokens:
            return sum(len(answer.prompt.ids) + len(answer.ids) for answer in self.running.values())
        return len(self.running)

    def end_calls(self, error: EngineDeadError) -> None:
        for future in self.calls.values():
            if not future.done():
                future.set_exception(error)
        self.calls.clear()


class Replicas:
    """`cache_tokens` is how many tokens a replica's cache holds: of what it was sent, no more are taken to be there."""

    def __init__(self, ports: Sequence[Sender], method: str = "auto", cache_tokens: int = 2**20) -> None:
        self.all = [Replica(number, port, method == "total_tokens") for number, port in enumerate(ports)]
        options = {"max_tree_size": cache_tokens} if method == "auto" else {}
        self._policy = build_policy(POLICIES[method], **options) if len(ports) > 1 else None

    @property
    def alive(self) -> list[Replica]:
        return [replica for replica in self.all if replica.death is None]

    def of(self, answer: RequestOutput) -> Replica:
        return self.all[answer.dp_rank or 0]

    def check(self, prompt: Prompt) -> None:
        """Raises if the replica that a request chooses cannot have it."""
        if prompt.dp_rank is None:
            return
        if not 0 <= prompt.dp_rank < len(self.all):
            problem = f"names one of this engine's {len(self.all)} replicas, counted from 0; got {prompt.dp_rank}"
            advice = "Leave it out, or start the engine with another --dp-size."
            raise RequestError(f"routed_dp_rank (or data_parallel_rank) {problem}. {advice}", field="routed_dp_rank")
        if (death := self.all[prompt.dp_rank].death) is not None:
            raise EngineDeadError(f"{death} It was replica {prompt.dp_rank}; leave routed_dp_rank out for another one.")

    def place(self, answer: RequestOutput) -> None:
        """Chooses the replica of a request, which counts as running there until it leaves."""
        prompt = answer.prompt
        if self._policy is not None:
            request = RoutingRequest(
                model="",
                text=prompt.adapter + prompt.namespace + _as_text(prompt),
                token_ids=prompt.ids.data,
                session=None if prompt.session is None else prompt.session.id,
                target=None if prompt.dp_rank is None else str(prompt.dp_rank),
            )
            self._policy.tick(time.monotonic())
            choice = self._policy.choose(self.alive, request)
            self._policy.routed(choice.worker_id, request)
            answer.dp_rank, answer.prefill_tokens = int(choice.worker_id), choice.prefill_tokens
            self.of(answer).prefill_tokens += choice.prefill_tokens
        self.of(answer).running[answer.handle] = answer

    def prefilled(self, answer: RequestOutput) -> None:
        replica = self.of(answer)
        replica.prefill_tokens = max(0.0, replica.prefill_tokens - answer.prefill_tokens)
        answer.prefill_tokens = 0.0

    def leave(self, answer: RequestOutput) -> None:
        self.prefilled(answer)
        self.of(answer).running.pop(answer.handle, None)

    def lose(self, number: int, error: EngineDeadError) -> list[RequestOutput]:
        """A replica has died: the requests that ran there."""
        replica = self.all[number]
        replica.death = error
        replica.end_calls(error)
        self.forget([number])
        running, replica.running = list(replica.running.values()), {}
        return running

    def forget(self, numbers: Iterable[int]) -> None:
        """Their caches are gone."""
        for number in numbers:
            if self._policy is not None:
                self._policy.removed(self.all[number].id)


def _as_text(prompt: Prompt) -> str:
    """A character for each token: what policies compare."""
    return (prompt.ids & CHARACTER_BITS).astype("<i4", copy=False).tobytes().decode("utf-32-le", "surrogatepass")


def merge_replies(replies: Mapping[int, Reply]) -> Reply:
    """The reply of several replicas: it is ok if each is. Counts are added up."""
    first = next(iter(replies.values()))
    if len(replies) == 1:
        return first
    refused = [number for number, reply in replies.items() if not reply.ok]
    texts = list(dict.fromkeys(reply.message for reply in replies.values()))
    if refused:
        texts = [f"Replica {number}: {replies[number].message}" for number in refused]
        if done := [str(number) for number, reply in replies.items() if reply.ok]:
            texts.append(f"Of the {len(replies)} replicas, {', '.join(done)} did it.")
    data = {name: sum(reply.data.get(name, 0) for reply in replies.values()) for name in first.data}
    return Reply(first.call, not refused, " ".join(texts), data)
