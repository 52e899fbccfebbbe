"""How many prompt tokens go into one step while streams run: as many as keep the gap between their tokens short.

The executor's chunk is chosen for throughput: a large model may compute it for a fifth of a second, in which no stream
gets a token. The cost of a prompt token is learnt from the steps that ran, so the same target suits any model and
device. Steps without streams take the whole chunk. While requests queue for long, gaps may be longer: larger steps lose
less to the decodes beside the prompts, and waiting requests gain more than streams lose.

A device computes some numbers of tokens with less waste than their neighbours (`Limits.even_tokens`), so steps aim at
these, decodes included.
"""

from __future__ import annotations

SMALLEST_SHARE = 8  # of the chunk: smaller steps would waste more of the device than a shorter gap is worth
MEMORY = 0.7  # of what was known before, when a further step is taken into account
SURPRISE = 2.0  # times what was known: one step that took longer counts as this, as it may have waited for something
CROWDED = 1.5  # times the target, while requests wait for long
# An even number of tokens is near where the step has at most STRETCH times as many as fit the target, or where its
# prompts have at least a SHRINKth of theirs.
STRETCH, SHRINK = 1.15, 1.2


class PrefillBudget:
    """Owns what is known of the cost of a prompt token. `most` is the executor's chunk; a target of 0 is none."""

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

    def observe(self, prompt_tokens: int, span: tuple[float, float] | None) -> None:
        """A step with prompts was on the device from span[0] to span[1]. Short ones say little about prompts, but all
        that are cut count: what was learnt wrong must not last."""
        if span is None or prompt_tokens < self._telling:
            return
        cost, known = (span[1] - span[0]) / prompt_tokens, self._cost_s
        if not known:
            self._cost_s = cost
            return
        surprised, self._surprised = self._surprised, cost > SURPRISE * known
        believed = cost if surprised else min(cost, SURPRISE * known)
        self._cost_s = MEMORY * known + (1.0 - MEMORY) * believed

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
