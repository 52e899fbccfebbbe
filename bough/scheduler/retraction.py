"""Retracts running requests: to preempt them for a far more urgent one, or when pages run out.

What a retracted request has computed stays in the tree. A request may only be retracted when no step is in flight,
because its last token must have arrived. `policy` decides which one goes.
"""

from bough.scheduler.admission import Forecast
from bough.scheduler.policy import Ranking, Running, preemption_order, retraction_order
from bough.scheduler.request import Request
from bough.scheduler.running_batch import RunningBatch
from bough.scheduler.waiting_queue import WaitingQueue


class Retraction:
    def __init__(
        self, batch: RunningBatch, queue: WaitingQueue, ranking: Ranking, forecast: Forecast, preemption_threshold: int
    ) -> None:
        self._batch, self._table, self._cache = batch, batch.table, batch.cache
        self._queue, self._ranking, self._forecast = queue, ranking, forecast
        self._preemption_threshold = preemption_threshold
        self.retracted = 0  # requests retracted since start

    def ensure_pages(self, now: float, *, drained: bool) -> bool:
        """Retracts until every decode can have its next page. False: the steps in flight must be committed first."""
        if not self._preempt_for_urgent(now, drained):
            return False
        if self._cache.growth > self._table.running:  # a page for everyone: no need to look who takes one
            return True
        decoding = self._table.decoding()
        while self._batch.pages_for_decodes(decoding, 1) > self._cache.growth or self._starved(len(decoding)):
            if not drained:
                return False
            self._retract(retraction_order(self._running())[0], now)
            decoding = self._table.decoding()
        return True

    def clear(self, now: float) -> None:
        """Retracts all requests; nothing may be in flight."""
        for request in list(self._table.running_requests()):
            self._retract(request.row, now)

    def _starved(self, decodes: int) -> bool:
        """Prompts hold all pages between them and none can go on."""
        return decodes == 0 and self._cache.growth == 0 and len(self._table.prefilling()) > 1

    def _preempt_for_urgent(self, now: float, drained: bool) -> bool:
        """Retracts less urgent requests when a much more urgent one could not start beside them. False: it should, and
        cannot yet."""
        if not self._ranking.by_priority or not len(self._queue):
            return True
        head = min(self._queue, key=lambda r: (-self._ranking.urgency(r), r.arrival))
        victims = preemption_order(self._running(), self._ranking.urgency(head), self._preemption_threshold)
        if not victims or self._fits(head):
            return True
        if not drained:
            return False
        for row in victims:
            self._retract(row, now)
            if self._fits(head):
                break
        return True

    def _fits(self, request: Request) -> bool:
        """Whether the request could start now, its cached prefix left out of account."""
        return self._table.free_rows > 0 and self._forecast.fits(request)

    def _running(self) -> list[Running]:
        table = self._table
        return [
            Running(r.row, int(table.known[r.row]) - r.prompt_len, r.prompt_len, r.arrival, self._ranking.urgency(r))
            for r in table.running_requests()
        ]

    def _retract(self, row: int, now: float) -> None:
        request = self._table.request_in(row)
        self._batch.leave(request)
        request.begin_waiting_again(now)
        self.retracted += 1
        self._queue.add(request)
        rest = self._table.running_requests()
        generated = sum(int(self._table.known[r.row]) - r.prompt_len for r in rest)
        self._forecast.ratio.after_retraction(generated, sum(r.max_new for r in rest), len(rest))
