"""How many drafts are worth verifying: as many as let the step give the most tokens in its time.

A draft that holds saves its request a step, and one that does not is computed for nothing. How likely a request's
drafts hold is learnt from the drafts that it has had, and from how many tokens before them the same guess was right;
what further tokens cost, from the times of the engine's own steps. So nothing is assumed of the model or the device.
"""

import numpy as np
import numpy.typing as npt

from bough.core.plan import IntArray
from bough.scheduler.rows import RowIndex, RowTable

PRIOR = 0.5  # of a request that has had no drafts yet
WEIGHT = 8.0  # drafts: how much of what is known of a request counts beside the next one
FORGET = 0.02  # of what is known, with each step in which a request could have had drafts and got none
GAIN = 1.02  # less than this is not worth the risk
PROBE = 32  # decisions for drafts, or against them, after which one goes the other way, to learn what that costs
MEMORY = 0.8  # of a step's time that was known, when a further one is taken into account
SURPRISE = 2.0  # times what was known: one step that took longer counts as this, as it may have waited for something
TRIALS = 3  # of a size before its time is believed: the first touches memory and code that later ones find ready
PAUSE = 4.0  # times a step: a device that did nothing for longer had nothing to do
EXACT = 16  # steps of more tokens than this share what is known with those of nearly as many
FINE = 8  # parts of a doubling

Floats = npt.NDArray[np.float64]


class StepTimes:
    """How long a step of decodes takes, by its number of tokens. Of sizes that were never measured the next smaller one
    stands for it: so they are tried."""

    def __init__(self) -> None:
        self._known: dict[int, float] = {}
        self._trials: dict[int, int] = {}
        self._tokens: Floats = np.zeros(0)
        self._seconds: Floats = np.zeros(0)

    def observe(self, tokens: int, seconds: float) -> None:
        size = _bucket(tokens)
        known = self._known.get(size)
        self._trials[size] = self._trials.get(size, 0) + 1
        slower = known is not None and seconds > known
        self._known[size] = (
            MEMORY * known + (1.0 - MEMORY) * min(seconds, SURPRISE * known) if known and slower else seconds
        )
        believed = sorted(size for size, trials in self._trials.items() if trials >= TRIALS)
        self._tokens = np.array(believed, dtype=np.float64)
        self._seconds = np.array([self._known[int(size)] for size in self._tokens])

    def believes(self, tokens: int) -> bool:
        return self._trials.get(_bucket(tokens), 0) >= TRIALS

    def of(self, tokens: npt.NDArray[np.int64]) -> Floats:
        """Relative to each other where nothing is known."""
        if not len(self._tokens):
            return np.ones(len(tokens))
        found: Floats = np.interp(tokens, self._tokens, self._seconds)
        return found


def _bucket(tokens: int) -> int:
    if tokens <= EXACT:
        return tokens
    grain = (1 << tokens.bit_length() - 1) // FINE
    return -(-tokens // grain) * grain


class DraftLengths:
    """Owns what is known of each row's drafts, while the row has the same owner."""

    def __init__(self, table: RowTable, most: int, *, adaptive: bool, levels: float = 1.0) -> None:
        """`levels`: by how much each draft makes a row's longer; of a tree by less than 1."""
        self._table, self._levels = table, levels
        self._most = most  # in one step
        self._adaptive = adaptive
        self._times = StepTimes()
        self._hold = np.full(len(table.requests), PRIOR)
        self._handles = np.full(len(table.requests), -1, dtype=np.int64)
        self._ended = 0.0  # the last step
        self._drafted, self._alike = False, 0  # the last decision, and how many were like it

    def knows_cost(self, rows: int) -> bool:
        """Whether a step of so many rows without drafts was measured: what has them is compared with that."""
        return not self._adaptive or self._times.believes(rows)

    def choose(self, rows: RowIndex, available: IntArray, matched: IntArray | int = 0) -> IntArray:
        """How many of the drafts that there are for each row it gets; the guesses `matched` so many tokens before."""
        if not available.any():
            return available
        changed = rows[self._handles[rows] != self._table.handle[rows]]
        self._handles[changed], self._hold[changed] = self._table.handle[changed], PRIOR
        # Tokens that the same guess would have had right count as drafts that held.
        hold = (WEIGHT * self._hold[rows] + matched) / (WEIGHT + matched) if self._adaptive else np.ones(len(rows))
        places = np.arange(1, int(available.max()) + 1)
        # What the first, second … draft of each row is likely to add: it holds if all before it do. That of a tree adds
        # a part of a level only: another one of the level may be what holds.
        likely = self._levels * hold[:, None] ** (self._levels * places)
        gains = np.where(places <= available[:, None], likely, -1.0)
        order = np.argsort(-gains, axis=None, kind="stable")[: min(self._most, int(available.sum()))]
        count = self._best(len(rows), gains.ravel()[order]) if self._adaptive else len(order)
        chosen = np.bincount(order[:count] // len(places), minlength=len(rows)).astype(np.int32)
        passed_over = rows[(available > 0) & (chosen == 0)]
        self._hold[passed_over] += FORGET * (PRIOR - self._hold[passed_over])
        return chosen

    def _best(self, rows: int, gains: Floats) -> int:
        """How many drafts, the likeliest first."""
        tokens = rows + np.concatenate([[0.0], gains.cumsum()])
        rates = tokens / self._times.of(rows + np.arange(len(tokens)))
        best = int(rates.argmax()) if rates.max() >= GAIN * rates[0] else 0
        self._alike = self._alike + 1 if self._drafted == (best > 0) else 0
        self._drafted = best > 0
        if self._alike < PROBE:
            return best
        self._alike = 0
        return 0 if self._drafted else len(gains)

    def observe(self, rows: RowIndex, proposed: IntArray, held: IntArray) -> None:
        """Of so many drafts of these rows, the first so many held."""
        known = self._hold[rows]
        failed = held < np.ceil(self._levels * proposed)
        self._hold[rows] = np.where(proposed > 0, (WEIGHT * known + held) / (WEIGHT + held + failed), known)

    def ran(self, tokens: int, span: tuple[float, float] | None) -> None:
        """A step of decodes alone computed so many tokens. What the device waited for it belongs to its time: the host
        was slower. A long pause is one between requests."""
        if span is None:
            return
        begun, ended = span
        waited, self._ended = begun - self._ended, ended
        self._times.observe(tokens, ended - begun + (waited if 0.0 < waited < PAUSE * (ended - begun) else 0.0))

    def searches_per_step(self, rows: int, seconds: float) -> float:
        """How many searches that take so long are as long as a step of so many rows, where that is known."""
        step = float(self._times.of(np.array([rows]))[0]) if self._times.believes(rows) else 0.0
        return step / seconds if step else np.inf
