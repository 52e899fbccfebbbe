"""How many drafts are worth verifying: as many as let the step give the most tokens in its time.

A draft that holds saves its request a step, and one that does not is computed for nothing. How likely a request's
drafts hold is learnt from the drafts that it has had, and from how many tokens before them the same guess was right;
what further tokens cost, from the times of the engine's own steps. So nothing is assumed of the model or the device.
"""

from bisect import insort
from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

import numpy as np

from bough.core.plan import IntArray
from bough.scheduler.rows import RowIndex, RowTable

PRIOR = 0.5  # of a request that has had no drafts yet
WEIGHT = 8.0  # drafts: how much of what is known of a request counts beside the next one
FORGET = 0.005  # of what is known, with each step in which a request could have had drafts and got none
GAIN = 1.02  # less than this is not worth the risk
KEEP = 0.985  # of its speed without drafts that each request has at least, apart from
LOAN = 1.0  # steps, which it may be behind, if of the tokens that its drafts are likely to add
TRUST = 0.5  # come
# A draft model falls asleep when its drafts are not worth their time: then steps take what they take without one.
HOPE = 0.75  # the prior of its drafts: it is tried seldom, and with few steps
MODEL_LOAN = 4.0  # the same as above for a request that tries it
SAVINGS = 16.0  # steps: what requests have gained that is remembered for those after them
# Decisions for drafts after which new requests do without, to learn what that costs now: steps are slow until their
# graphs are captured. More each time, as those requests gain nothing.
EARLY_PROBE, LATE_PROBE = 64, 4096
REST, LONGEST_REST = 1024, 16 * 1024  # steps between two trials: few at first, more after each in vain
PROBE = 256  # decisions for drafts, or against them, after which one goes the other way, to learn what that costs
MEMORY = 0.8  # of a step's time that was known, when a further one is taken into account
SURPRISE = 2.0  # times what was known: one step that took longer counts as this, as it may have waited for something
TRIALS = 3  # of a size before its time is believed: the first touches memory and code that later ones find ready
PAUSE = 4.0  # times a step: a device that did nothing for longer had nothing to do
EXACT = 16  # steps of more tokens than this share what is known with those of nearly as many
FINE = 8  # parts of a doubling


class StepTimes:
    """How long steps of some kind take, by their number of tokens."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}
        self._trials: Counter[int] = Counter()
        self.sizes: list[int] = []  # that are believed

    def observe(self, tokens: int, seconds: float) -> None:
        size = _bucket(tokens)
        known = self._known.get(size)
        self._trials[size] += 1
        slower = known is not None and seconds > known
        self._known[size] = (
            MEMORY * known + (1.0 - MEMORY) * min(seconds, SURPRISE * known) if known and slower else seconds
        )
        if self._trials[size] == TRIALS:
            insort(self.sizes, size)

    def believes(self, tokens: int) -> bool:
        return self._trials.get(_bucket(tokens), 0) >= TRIALS

    def of(self, rows: int) -> float:
        """Between known sizes it follows from these, beyond it is that of the nearest."""
        return float(np.interp(rows, self.sizes, [self._known[size] for size in self.sizes]))

    def with_drafts(self, rows: int, drafts: int, without: float) -> list[float]:
        """Those of steps with up to so many drafts, where none take the time `without`. Beyond the known sizes half of
        what further drafts have cost so far is added, so they are tried."""
        sizes = [size for size in self.sizes if size > rows]
        known, most = [without, *(self._known[size] for size in sizes)], rows + drafts
        if sizes and sizes[-1] < most:
            slope = max(0.0, (known[-1] - without) / (sizes[-1] - rows))
            sizes, known = [*sizes, most], [*known, known[-1] + 0.5 * slope * (most - sizes[-1])]
        found: list[float] = np.interp(np.arange(rows, most + 1), [rows, *sizes], known).tolist()
        return found


def _bucket(tokens: int) -> int:
    if tokens <= EXACT:
        return tokens
    grain = (1 << tokens.bit_length() - 1) // FINE
    return -(-tokens // grain) * grain


class DraftLengths:
    """Owns what is known of each row's drafts, while the row has the same owner."""

    def __init__(self, table: RowTable, most: int, *, adaptive: bool, levels: float = 1.0, model: bool = False) -> None:
        """`levels`: by how much each draft makes a row's longer; of a tree by less than 1. `model`: they are a draft
        model's, whose part of a step costs time even where it drafts nothing."""
        self._table, self._levels, self._model = table, levels, model
        self._prior, self._loan = (HOPE, MODEL_LOAN) if model else (PRIOR, LOAN)
        self._most = most  # in one step
        self._adaptive = adaptive
        self._times, self._without = StepTimes(), StepTimes()  # of steps with drafts, and of those that have none
        # Tokens that each row has got beyond what it would have without drafts, at `KEEP` of its speed.
        self._ahead = np.zeros(len(table.requests))
        self._hold = np.full(len(table.requests), self._prior)
        self._handles = np.full(len(table.requests), -1, dtype=np.int64)
        self._ended = 0.0  # the last step
        self._drafted, self._alike = False, 0  # the last decision, and how many were like it
        self._until, self._plain = EARLY_PROBE, False  # the last step had no part of the draft model
        self._saved, self._rest, self._next_rest = 0.0, 0, REST

    def knows_cost(self, rows: int) -> bool:
        """Whether a step of so many rows without drafts was measured: what has them is compared with that."""
        near = self._model and any(rows <= 2 * size and size <= 2 * rows for size in self._without.sizes)
        return not self._adaptive or near or self._without.believes(rows)

    @property
    def resting(self) -> bool:
        """Whether new requests do without the draft model."""
        return self._rest > 0

    def behind(self, rows: RowIndex) -> bool:
        """Whether one of these rows has lost what it may."""
        return self._adaptive and bool((self._ahead[rows] < -self._loan).any())

    def give_up(self) -> None:
        """Requests go on without the draft model; so do new ones, if others before them have not gained more."""
        self._saved -= 1.0
        if self._saved <= 0.0 and not self._rest:
            self._saved, self._rest, self._next_rest = 0.0, self._next_rest, min(2 * self._next_rest, LONGEST_REST)

    def choose(self, rows: RowIndex, available: IntArray, matched: IntArray | int = 0) -> IntArray:
        """How many of the drafts that there are for each row it gets; the guesses `matched` so many tokens before."""
        changed = rows[self._handles[rows] != self._table.handle[rows]]
        self._handles[changed], self._hold[changed] = self._table.handle[changed], self._prior
        self._ahead[changed] = 0.0
        if not available.any():
            return available
        # Tokens that the same guess would have had right count as drafts that held.
        hold = (WEIGHT * self._hold[rows] + matched) / (WEIGHT + matched) if self._adaptive else np.ones(len(rows))
        # What the next draft of each row is likely to add: it holds if all before it do. That of a tree adds a part of
        # a level only: another one of the level may be what holds.
        factors, left = (hold**self._levels).tolist(), available.tolist()
        heap = [(-self._levels * factor, i) for i, factor in enumerate(factors) if left[i]]
        heapify(heap)
        order: list[tuple[float, int]] = []  # the likeliest first, with their rows
        while heap and len(order) < self._most:
            gain, i = heap[0]
            order.append((-gain, i))
            left[i] -= 1
            if left[i]:
                heapreplace(heap, (gain * factors[i], i))
            else:
                heappop(heap)
        count = self._best(rows, order) if self._adaptive else len(order)
        chosen = np.bincount([i for _, i in order[:count]], minlength=len(rows)).astype(np.int32)
        passed_over = rows[(available > 0) & (chosen == 0)]
        self._hold[passed_over] += FORGET * (self._prior - self._hold[passed_over])
        return chosen

    def _best(self, rows: RowIndex, order: Sequence[tuple[float, int]]) -> int:
        """How many of these: as many as let the step give the most tokens in its time, while no row falls further
        behind than it may."""
        # A first one that is slow costs little; most of what a draft model costs is the same for one and for many.
        n, most = len(rows), len(order) if self._times.sizes or self._model else 1
        without, ahead, tokens, best, highest = self._without.of(n), self._ahead[rows].tolist(), float(n), 0, 0.0
        times, least = self._times.with_drafts(n, most, without), min(ahead)
        for count, (gain, i) in enumerate(order[:most], 1):
            tokens += gain
            behind, ahead[i] = ahead[i] == least, ahead[i] + TRUST * gain
            least = min(ahead) if behind else least
            if tokens > highest * times[count] and KEEP * times[count] <= (1.0 + self._loan + least) * without:
                best, highest = count, tokens / times[count]
        worth = highest >= GAIN * n / without
        self._alike = self._alike + 1 if self._drafted == worth else 0
        self._drafted = worth
        if self._alike < (self._until if self._model else PROBE):
            return best if worth else 0
        self._alike = 0
        if self._model:
            self._rest, self._until = self._rest or TRIALS + 1, min(4 * self._until, LATE_PROBE)
            return best if worth else 0
        return 0 if worth else best

    def observe(self, rows: RowIndex, proposed: IntArray, held: IntArray) -> None:
        """Of so many drafts of these rows, the first so many held."""
        known = self._hold[rows]
        failed = held < np.ceil(self._levels * proposed)
        self._hold[rows] = np.where(proposed > 0, (WEIGHT * known + held) / (WEIGHT + held + failed), known)

    def ran(
        self, rows: RowIndex, counts: IntArray, tokens: int, span: tuple[float, float] | None, plain: bool = False
    ) -> None:
        """A step of decodes alone computed so many tokens, and its rows got so many; `plain`: without the draft model.
        What the device waited for it belongs to its time: the host was slower. A long pause is one between requests.
        """
        self._plain, follows = plain, self._plain  # the first without drafts may still be of the other kind
        if plain and self._rest:
            self._rest -= 1
            self._times = self._times if self._rest else StepTimes()  # what they take now is to be seen
        if span is None:
            return
        begun, ended = span
        (waited, self._ended), n = (begun - self._ended, ended), len(rows)
        seconds = ended - begun + (waited if 0.0 < waited < PAUSE * (ended - begun) else 0.0)
        if plain or (tokens == n and not self._model):
            if follows or not self._model:
                self._without.observe(n, seconds)
            self._ahead[rows] += 1.0 - KEEP
            return
        if self._without.sizes:
            without = self._without.of(n)
            expected = self._times.with_drafts(n, tokens - n, without)[-1]  # what takes far longer waited for something
            gained = counts - KEEP * min(seconds, SURPRISE * expected) / without
            self._ahead[rows] += gained
            self._saved = min(SAVINGS, self._saved + float(gained.mean()))
            self._next_rest = REST if self._saved == SAVINGS else self._next_rest
        self._times.observe(tokens, seconds)

    def searches_per_step(self, rows: int, seconds: float) -> float:
        """How many searches that take so long are as long as a step of so many rows, where that is known."""
        step = self._without.of(rows) if self._without.believes(rows) else 0.0
        return step / seconds if step else np.inf
