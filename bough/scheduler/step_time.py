"""Estimates when the running step ends, so that the next one is planned as late as possible without a device idle.

A planned step cannot take requests that arrive after it. So where a step is known to take long, the next one is
planned shortly before its end. The estimate is learnt from steps that ran: their time on the device, and the host's
time to plan and launch one. A step of unknown duration counts as ended. The loop polls the running step, because the
estimate may be wrong.
"""

from __future__ import annotations

from bough.scheduler.assembly import PlannedStep

MEMORY = 0.7  # of what was known before, when a further step took longer (or its planning and launch did not)
SURE = 0.9  # of the time that a step is expected to take: some take less
LEAD_S = 0.002  # beyond planning and launching, for the host's own delays
TELLING_TOKENS = 512  # fewer prompt tokens in a step say nothing of what each costs
OWN_SHARE = 0.5  # of a step's time: if the host took longer to launch it, the device waited, and it says nothing at all


class StepTimeEstimate:
    """Owns the measured step times. Unless the executor allows late plans, every step is planned at once."""

    def __init__(self, late: bool) -> None:
        self._late = late
        self._decode_s: float | None = None  # a step without prompts
        self._prompt_token_s = 0.0  # what each token of a prompt adds to that; 0: not known
        self._host_s = 0.0  # planning and launching a step
        self._hosted: dict[int, float] = {}  # the same for each step in flight
        self._launched_at = 0.0
        self._free_at = 0.0  # when the last step that is known to have ended did

    def launched(self, step: PlannedStep, begun_at: float, done_at: float) -> None:
        """The host was at work on this step's plan and launch from `begun_at` to `done_at`."""
        self._launched_at = begun_at
        taken_s = self._hosted[step.plan.step] = done_at - begun_at
        self._host_s = max(taken_s, MEMORY * self._host_s + (1.0 - MEMORY) * taken_s)

    def ran(self, step: PlannedStep, span: tuple[float, float] | None) -> None:
        hosted_s = self._hosted.pop(step.plan.step)
        if span is None:
            return
        taken_s, self._free_at = span[1] - span[0], span[1]
        if hosted_s > OWN_SHARE * taken_s:
            return
        if not step.chunks:
            self._decode_s = _least(self._decode_s, taken_s)
            return
        if self._decode_s is not None:
            self._decode_s = min(self._decode_s, taken_s)  # with prompts it takes no less than without
        if step.prompt_tokens >= TELLING_TOKENS:
            beyond_s = taken_s - (self._decode_s or 0.0)
            self._prompt_token_s = _least(self._prompt_token_s or None, beyond_s / step.prompt_tokens)

    def plan_by(self, running: PlannedStep) -> float:
        """When the step behind the only one that runs must be planned."""
        if not self._late:
            return 0.0
        expected_s = (self._decode_s or 0.0) + self._prompt_token_s * running.prompt_tokens
        return max(self._free_at, self._launched_at) + SURE * expected_s - LEAD_S - self._host_s


def _least(known: float | None, seen: float) -> float:
    """Follows what takes less at once, and what takes more slowly: too short a guess costs little."""
    return seen if known is None or seen < known else MEMORY * known + (1.0 - MEMORY) * seen
