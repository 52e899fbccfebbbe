"""In-memory ends of the scheduler's channels."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bough.core.finish import FinishReason
from bough.core.sampling_params import SamplingParams
from bough.messages.outputs import Open, Reply, Started, StepOutput
from bough.messages.requests import Generate, LogprobRequest, ToScheduler


def generate(handle: int, prompt: list[int], **options: object) -> Generate:
    """A request as the client would send it; sampling fields and request fields mixed."""
    fields = {name: options.pop(name) for name in ("priority", "namespace", "seed", "stream") if name in options}
    logprobs = options.pop("logprobs", None)
    assert logprobs is None or isinstance(logprobs, LogprobRequest)
    return Generate(
        handle=handle,
        rid=f"r{handle}",
        input_ids=np.array(prompt, dtype=np.int32).tobytes(),
        sampling=SamplingParams(**options),  # type: ignore[arg-type]
        seed=int(fields.pop("seed", 0)),  # type: ignore[call-overload]
        logprobs=logprobs,
        **fields,  # type: ignore[arg-type]
    )


class FakeInbox:
    """Messages that a test puts in. Waiting for ever on an empty box means the scheduler is idle: the test is told."""

    def __init__(self) -> None:
        self.pending: list[ToScheduler] = []
        self.idle_waits = 0

    def receive(self, timeout_s: float | None = 0.0) -> list[ToScheduler]:
        if not self.pending and timeout_s is None:
            self.idle_waits += 1
        messages, self.pending = self.pending, []
        return messages


class FakeOutbox:
    """Collects what each request got, and insists on the order: opened first, one ending, nothing after it."""

    def __init__(self) -> None:
        self.opened: set[int] = set()
        self.outputs: dict[int, list[int]] = defaultdict(list)
        self.started: dict[int, Started] = {}
        self.ended: dict[int, FinishReason] = {}
        self.retractions: dict[int, int] = {}
        self.replies: list[Reply] = []

    def tokens(self, message: Open | StepOutput) -> None:
        if isinstance(message, Open):
            assert message.handle not in self.opened
            self.opened.add(message.handle)
            return
        handles = np.frombuffer(message.handles, dtype=np.int64).tolist()
        for handle, token in zip(handles, np.frombuffer(message.tokens, dtype=np.int32).tolist(), strict=True):
            assert handle in self.opened and handle not in self.ended
            self.outputs[handle].append(token)
        for start in message.started:
            assert start.handle not in self.started
            self.started[start.handle] = start
        for end in message.ended:
            assert end.handle in self.opened and end.handle not in self.ended, "one terminal message, exactly"
            self.ended[end.handle] = end.reason
            self.retractions[end.handle] = end.retractions

    def reply(self, message: Reply) -> None:
        self.replies.append(message)
