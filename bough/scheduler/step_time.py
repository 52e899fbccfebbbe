"""What is learnt from the times of steps: when the running step ends, and what a prompt token costs.

Owns the measured times. They hold for any model and device, because each engine learns its own.
"""

import math

from bough.scheduler.assembly import PlannedStep

MEMORY = 0.7  # of what was known before, when a further step is taken into account
# When the running step ends.
SURE = 0.9  # of the time that a step is expected to take: some take less
LEAD_S = 0.002  # beyond planning and launching, for the host's own delays
TELLING_TOKENS = 512  # fewer prompt tokens in a step say nothing of what each costs
OWN_SHARE = 0.5  # of a step's time: if the host took longer to launch it, the device waited, and it says nothing at all
# How many prompt tokens go into a step.
SMALLEST_SHARE = 8  # of the chunk: smaller steps would waste more of the device than a shorter gap is worth
SURPRISE = 2.0  # times what was known: one step that took longer counts as this, as it may have waited for something
CROWDED = 1.5  # times the target, while requests wait for long
# An even number of tokens is near where the step has at most STRETCH times as many as fit the target, or where its
# prompts have at least a SHRINKth of theirs.
STRETCH, SHRINK = 1.15, 1.2
LEAST_SHARE = 0.05  # of a short step's time, for its prompts: the rest is what any step takes


class StepTimeEstimate:
    """When the running step ends. The next one is planned shortly before, because a planned step cannot take requests
    that arrive after it. A step of unknown duration counts as ended, and the loop polls the running step, because the
    estimate may be wrong. Unless the executor allows late plans, every step is planned at once."""

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


class PrefillBudget:
    """How many prompt tokens go into one step while streams run: as many as keep the gap between their tokens short.
    Steps without streams take the whole chunk (`most`), which the executor chose for throughput; so do all with a
    target of 0. While requests queue for long, gaps may be longer: larger steps lose less to the decodes beside the
    prompts. A device computes some numbers of tokens with less waste than their neighbours (`Limits.even_tokens`), so
    steps aim at these, decodes included."""

    def __init__(self, target_s: float, most: int, page_size: int, even: int = 1) -> None:
        self._target_s = target_s
        self._most = most
        self._page_size = page_size
        self._even = even
        self._least = min(most, max(most // SMALLEST_SHARE, page_size))  # less than a page would be no step at all
        # The shortest that a step is cut to: it may be evened, and a prompt is cut between pages.
        self._telling = min(self._least, max(page_size, self._least / SHRINK - page_size))
        self._surprised = False  # by the last step
        self._cost_s: float | None = None  # of a prompt token, with the decodes beside it
        self._decode_s = math.inf  # the fastest step without prompts
        self._short = (math.inf, 1)  # of the fastest short step: what each of its prompt tokens took, and how many

    def observe(self, prompt_tokens: int, span: tuple[float, float] | None, *, loads: bool = False) -> None:
        """A step with prompts was on the device from span[0] to span[1]. Short ones say little about prompts, but all
        that are cut count: what was learnt wrong must not last. One that waits for pages may take longer for that."""
        if span is None:
            return
        if not prompt_tokens:
            self._decode_s = min(self._decode_s, span[1] - span[0])
            return
        cost, known = (span[1] - span[0]) / prompt_tokens, self._cost_s
        if prompt_tokens < self._telling:
            self._short = min(self._short, (cost, prompt_tokens))
            return
        if not known:
            self._cost_s = cost
            return
        if loads and cost > known:
            return
        surprised, self._surprised = self._surprised, cost > SURPRISE * known
        believed = cost if surprised else min(cost, SURPRISE * known)
        self._cost_s = MEMORY * known + (1.0 - MEMORY) * believed

    @property
    def tokens_per_s(self) -> float | None:
        """How fast prompts are computed; None before the first."""
        return 1.0 / self._cost_s if self._cost_s else None

    @property
    def likely_tokens_per_s(self) -> float | None:
        """The same or, where only short steps have been seen, what these take beyond a step without prompts."""
        cost, tokens = self._short
        decode_s = self._decode_s if self._decode_s < math.inf else 0.0
        seconds = max(cost - decode_s / tokens, LEAST_SHARE * cost)
        return self.tokens_per_s or (seconds and 1.0 / seconds) or None

    def budget(self, *, streaming: bool, crowded: bool = False, decodes: int = 0) -> int:
        """Prompt tokens for the next step, which has so many decodes as well."""
        if not streaming or not self._cost_s or not self._target_s:
            return self._most
        target_s = self._target_s * (CROWDED if crowded else 1.0)
        fits = max(self._least, int(target_s / self._cost_s))
        return min(self._most, self._evened(fits, decodes))

    def _evened(self, fits: int, decodes: int) -> int:
        """As many as make the step as a whole even, if such a number is near."""
        tokens = fits + decodes
        above = -(-tokens // self._even) * self._even
        below = above - self._even
        near = [above] if above <= STRETCH * tokens else []
        if below - decodes >= max(fits / SHRINK, self._page_size):
            near.append(below)
        return min(near, key=lambda even: abs(even - tokens), default=tokens) - decodes
