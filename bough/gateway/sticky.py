"""Which worker holds a stored response: those of `/v1/responses` live in the memory of the worker that made them."""

from __future__ import annotations

from collections import OrderedDict

from bough.gateway.worker import Worker

REMEMBERED = 100_000


class StickyAnswers:
    """Workers by the id of an answer, the latest ones."""

    def __init__(self) -> None:
        self._workers: OrderedDict[str, Worker] = OrderedDict()

    def remember(self, name: str, worker: Worker) -> None:
        self._workers[name] = worker
        self._workers.move_to_end(name)
        while len(self._workers) > REMEMBERED:
            self._workers.popitem(last=False)

    def find(self, name: str) -> Worker | None:
        worker = self._workers.get(name)
        return None if worker is None or worker.removed else worker
