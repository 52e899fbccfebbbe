"""Routes a request to the worker that will have computed its prompt first.

The cost of a worker, in prompt tokens over its speed, is what it would have to compute of this prompt (what it was not
sent before) and what is queued there: prompts of this process's requests that have no first token yet, and a share
of the device for each running request, those of other senders included. Short prompts that begin alike therefore
spread as soon as requests queue. More than that is copied only to a worker with little in its cache or little to do.
"""

import functools
import itertools
import math
import operator
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bough.core.errors import SettingsError
from bough.gateway.policies import Choice, RoutingRequest, WorkerView, ranking
from bough.gateway.policies.cache_aware import TextTreePolicy
from bough.gateway.policies.plain import CHARS_PER_TOKEN

NEAR_TOKENS = 32  # costs that differ by less are equal: a few tokens take as long as one
NEAR_SPEED = 0.8  # speeds are measured, so this share of the mean, or its inverse, is no difference
STEP_TOKENS = 256  # that a step computes beside its decodes in little more time, at most
STEP_S = 0.025  # that "little more" is: slow engines compute fewer in it
PRIOR_SPEED = 4000.0  # tokens a second between those of CPUs and GPUs, until a worker has computed its first prompt
OTHERS_WEIGHT = 0.5  # what others had there a second ago is partly gone, and all who read it avoid the same workers
ALIKE = 0.9  # of the most that a worker holds of a prompt: who has that much holds it as well
HOME_CHARS = 256  # of the beginning of a prompt, by which processes agree on a worker and hot ones are counted
RECENT, FEW = 64, 4  # prompts in which hot beginnings are counted, and how many are too few to tell
_speed_of = operator.attrgetter("speed")


@dataclass(eq=False)
class CostPolicy(TextTreePolicy):
    cache_weight: float = 8.0  # of a long prompt's tokens against queued ones: their work delays later requests too
    home_share: float = 0.0  # of a prompt that is new here, expected at the worker that a hash of its beginning names
    request_tokens: float = 64.0  # what a running request takes from those behind it, in prompt tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cache_weight < 1.0 or self.request_tokens < 0.0 or not 0.0 <= self.home_share <= 1.0:
            text = "cache_weight must be at least 1, request_tokens at least 0, and home_share between 0 and 1."
            raise SettingsError(text)
        # When each worker was last chosen; the order of those that never were is random.
        self._turns: dict[str, float] = defaultdict(lambda: -self._dice.random())
        self._numbers = itertools.count(1)
        self._recent: deque[str] = deque(maxlen=RECENT)  # beginnings of prompts

    def pick(self, workers: Sequence[WorkerView], request: RoutingRequest) -> Choice:
        text, ids = request.text, request.token_ids
        tokens = len(text) / CHARS_PER_TOKEN if ids is None else float(len(ids))
        chars = len(text) or 1
        sent = self._sent.match(text)
        held = self._with_home(workers, text, sent) if self.home_share else sent
        mean_speed, step, near, alike = _pace(tuple(map(_speed_of, workers)))
        each, more, of_char = self.request_tokens, self.cache_weight - 1.0, tokens / chars
        loads, queued, costs = [], [], []
        for worker in workers:  # in one loop, because a comprehension costs as much as what it does for a few workers
            load = worker.load + OTHERS_WEIGHT * worker.other_load
            ahead = worker.prefill_tokens + each * load
            left = tokens - of_char * held.get(worker.id, 0)
            loads.append(load)
            queued.append(ahead)
            costs.append(ahead + left + more * (left - near) if left > near else ahead + left)
        self._recent.append(text[:HOME_CHARS])
        if 2.0 * min(loads) + 2.0 < sum(loads) / len(loads) and (idle := self._idle(workers, loads, sent)):
            workers = [workers[place] for place in idle]
            loads, queued, costs = ([column[place] for place in idle] for column in (loads, queued, costs))
        copy = tokens + more * (tokens - step) if tokens > step else tokens  # little may be computed in passing
        if held and copy + min(queued) < min(costs) and of_char * max(held.values()) > near:
            for place in self._fresh(workers):
                costs[place] = min(costs[place], copy + queued[place])
        for place, worker in () if alike else enumerate(workers):
            speed = worker.speed / mean_speed if worker.speed else 1.0
            costs[place] /= 1.0 if NEAR_SPEED < speed < 1.0 / NEAR_SPEED else speed
        least = min(costs) + near
        # Among equals the one with the fewest requests, then the one that has waited longest for one.
        taken, fewest, longest, turns = workers[0], math.inf, 0.0, self._turns
        for worker, load, cost in zip(workers, loads, costs, strict=True):
            if load <= fewest and cost <= least:
                turn = turns[worker.id]
                if load < fewest or turn < longest:
                    taken, fewest, longest = worker, load, turn
        turns[taken.id] = next(self._numbers)
        share = sent.get(taken.id, 0) / chars
        return Choice(taken.id, share, tokens * (1.0 - share))

    def _fresh(self, workers: Sequence[WorkerView]) -> list[int]:
        """The places of workers that were sent less than half of the mean, as after joining."""
        sent = [self._sent.size(worker.id) for worker in workers]
        few = sum(sent) / (2 * len(sent))
        return [place for place, size in enumerate(sent) if size < few]

    def _idle(self, workers: Sequence[WorkerView], loads: Sequence[float], held: Mapping[str, float]) -> list[int]:
        """Places of workers with so little to do beside the others that one of them gets the request whatever it has
        cached. A fresh one fills up this way. One that was sent as much as the others has a quiet moment: it gets a
        copy only of what is hot, so that caches differ: of what several workers hold and half of the others, of what is
        more than one worker's share of the last prompts, or of what only workers with far more than the mean hold."""
        mean = sum(loads) / len(loads)
        idle = [place for place, load in enumerate(loads) if 2.0 * load + 2.0 < mean]
        alike = ALIKE * max(held.get(worker.id, 0) for worker in workers)
        holders = [load for worker, load in zip(workers, loads, strict=True) if held.get(worker.id, 0) >= alike]
        spread = len(holders) > 1 and 2 * len(holders) + 1 >= len(workers)
        often = self._recent.count(self._recent[-1]) > max(FEW, len(self._recent) / len(workers))
        if not spread and not often and min(holders) <= 2.0 * (mean + 2.0):
            idle = sorted(set(idle).intersection(self._fresh(workers)))
        return idle

    def _with_home(self, workers: Sequence[WorkerView], text: str, held: Mapping[str, float]) -> Mapping[str, float]:
        """Another process may have sent a beginning that this one does not know: all expect it at the same worker."""
        if len(text) < HOME_CHARS or any(held.get(worker.id, 0) >= HOME_CHARS for worker in workers):
            return held
        return {**held, ranking(text[:HOME_CHARS], workers)[0].id: self.home_share * len(text)}

    def removed(self, worker_id: str) -> None:
        super().removed(worker_id)
        self._turns.pop(worker_id, None)


@functools.lru_cache(maxsize=16)  # they change about once a second
def _pace(speeds: tuple[float | None, ...]) -> tuple[float, float, float, bool]:
    """The mean speed, the tokens of a step and those that are no difference, and whether the speeds are alike."""
    known = [speed for speed in speeds if speed]
    mean = sum(known) / len(known) if known else PRIOR_SPEED
    step = min(STEP_S * mean, STEP_TOKENS)
    alike = not known or (min(known) > NEAR_SPEED * mean and NEAR_SPEED * max(known) < mean)
    return mean, step, min(step, NEAR_TOKENS), alike
