"""In-memory ends of the scheduler's channels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bough.core.finish import FinishReason
from bough.core.sampling_params import SamplingParams
from bough.messages.outputs import DraftCounts, HiddenStates, Open, Reply, Started, StepOutput
from bough.messages.requests import Generate, LogprobRequest, ToScheduler
from bough.scheduler.loop import QUIET_S
from bough.scheduler.request import Request


def generate(handle: int, prompt: list[int], **options: object) -> Generate:
    """A request as the client would send it; sampling fields and request fields mixed."""
    names = (
        "rid",
        "priority",
        "namespace",
        "seed",
        "stream",
        "names",
        "output_ids",
        "thinking",
        "bad_words",
        "custom_logit_processor",
        "pooling",
        "bootstrap",
        "adapter",
        "media",
        "session",
        "followed",
        "made_at",
    )
    fields = {name: options.pop(name) for name in names if name in options}
    logprobs = options.pop("logprobs", None)
    assert logprobs is None or isinstance(logprobs, LogprobRequest)
    return Generate(
        handle=handle,
        rid=str(fields.pop("rid", f"r{handle}")),
        input_ids=np.array(prompt, dtype=np.int32).tobytes(),
        sampling=SamplingParams(**options),  # type: ignore[arg-type]
        seed=int(fields.pop("seed", 0)),  # type: ignore[call-overload]
        logprobs=logprobs,
        **fields,  # type: ignore[arg-type]
    )


def waiting_request(arrival: int = 0, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> Request:
    """A request as intake makes them; sampling fields and the request's own mixed."""
    own = {name: fields.pop(name) for name in list(fields) if name in Request.__slots__}
    sampling = SamplingParams(**fields)
    made: dict[str, Any] = {
        "handle": arrival,
        "tokens": np.array(prompt, dtype=np.int32),
        "prompt_len": len(prompt),
        "sampling": sampling,
        "seed": 0,
        "max_new": sampling.max_new_tokens,
        "stop_ids": frozenset(sampling.stop_token_ids),
        "namespace": "",
        "priority": 0,
        "logprobs": None,
        "arrival": arrival,
        "since": 0.0,
        "logprob_next": len(prompt) - 1,
        "logprob_end": len(prompt) - 1,
    }
    return Request(**(made | own))


class FakeInbox:
    """Messages that a test puts in: `pending` ones are there, a batch of `later` comes only to one who waits. Waiting
    for ever on an empty box, or until a session expires, means the scheduler is idle: the test is told."""

    def __init__(self) -> None:
        self.pending: list[ToScheduler] = []
        self.later: list[list[ToScheduler]] = []
        self.waits: list[float | None] = []  # how long it was willing to wait, each time that it was
        self.idle_waits = 0

    def receive(self, timeout_s: float | None = 0.0) -> list[ToScheduler]:
        if timeout_s != 0.0 and not self.pending:
            self.waits.append(timeout_s)
            if self.later:
                return self.later.pop(0)
            self.idle_waits += timeout_s is None or timeout_s > QUIET_S
        messages, self.pending = self.pending, []
        return messages


class FakeOutbox:
    """Collects what each request got, and insists on the order: opened first, one ending, nothing after it."""

    def __init__(self) -> None:
        self.opened: set[int] = set()
        self.outputs: dict[int, list[int]] = defaultdict(list)
        self.scored: dict[int, list[int]] = defaultdict(list)  # output tokens whose logprobs came
        self.scores: dict[int, list[float]] = defaultdict(list)  # and those
        self.started: dict[int, Started] = {}
        self.ended: dict[int, FinishReason] = {}
        self.vectors: dict[int, bytes] = {}
        self.retractions: dict[int, int] = {}
        self.versions: dict[int, str] = {}
        self.drafts: dict[int, DraftCounts | None] = {}
        self.states: dict[int, list[HiddenStates]] = defaultdict(list)
        self.replies: list[Reply] = []

    def tokens(self, message: Open | StepOutput) -> None:
        if isinstance(message, Open):
            assert message.handle not in self.opened
            self.opened.add(message.handle)
            return
        handles = np.frombuffer(message.handles, dtype=np.int64)
        counts = np.frombuffer(message.counts, dtype=np.int32) if message.counts else np.ones(len(handles), dtype=int)
        tokens = np.frombuffer(message.tokens, dtype=np.int32)
        assert len(tokens) == counts.sum() and len(set(handles.tolist())) == len(handles) == len(counts)
        for handle, token in zip(handles.repeat(counts).tolist(), tokens.tolist(), strict=True):
            assert handle in self.opened and handle not in self.ended
            self.outputs[handle].append(token)
        for handle, states in message.states.items():
            self.states[handle].append(states)
        for handle, logprobs in message.logprobs.items():
            self.scored[handle] += np.frombuffer(logprobs.tokens, dtype=np.int32).tolist()
            self.scores[handle] += np.frombuffer(logprobs.logprobs, dtype=np.float32).tolist()
        for start in message.started:
            assert start.handle not in self.started
            self.started[start.handle], self.versions[start.handle] = start, start.weight_version
        self.versions |= {handle: version for handle, (_, version) in message.retractions.items()}
        for end in message.ended:
            assert end.handle in self.opened and end.handle not in self.ended, "one terminal message, exactly"
            self.ended[end.handle] = end.reason
            self.vectors[end.handle] = end.vector
            self.retractions[end.handle] = end.retractions
            self.drafts[end.handle] = end.drafts

    def reply(self, message: Reply) -> None:
        self.replies.append(message)
