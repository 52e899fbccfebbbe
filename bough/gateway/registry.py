"""All workers by id, whether they are in rotation, and the models that they serve.

Listeners (policies, waiting requests, health checks) are called for each change.
"""

import logging
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from bough.core.errors import SettingsError
from bough.core.gateway_settings import UNLIMITED, GatewaySettings
from bough.gateway.breaker import Breaker
from bough.gateway.worker import Worker, worker_id

log = logging.getLogger(__name__)

# Sources of workers that are treated differently.
MANAGEMENT = "api"  # added over the management routes
LAUNCHED = "launch"  # started by the gateway itself
MOST_MODELS = 256  # whose workers are remembered
DISCOVERED = "kubernetes"  # each gateway process looks for these itself


class RegistryListener:
    """Override what you need."""

    def added(self, worker: Worker) -> None:
        """The worker is known, and not yet in rotation."""

    def changed(self, worker: Worker) -> None:
        """The worker entered or left rotation, or has other models."""

    def removed(self, worker: Worker) -> None:
        """The worker gets no more requests."""


class Registry:
    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._workers: dict[str, Worker] = {}
        self._listeners: list[RegistryListener] = []
        self._available: dict[str | None, list[Worker]] = {}  # by model, until a worker changes
        self._models: frozenset[str] = frozenset()

    def listen(self, listener: RegistryListener) -> None:
        self._listeners.append(listener)

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self._workers.values()))

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, identity: str) -> Worker | None:
        return self._workers.get(identity)

    def add(
        self, url: str, api_key: str | None = None, source: str = MANAGEMENT, bootstrap_port: int | None = None
    ) -> Worker:
        """The worker at that URL, known or new. The fleet's key never goes to a URL from the management routes."""
        url = normal_url(url)
        key = checked_key(api_key or (self._settings.worker_api_key if source != MANAGEMENT else None))
        known = self._workers.get(worker_id(url))
        if known is not None:
            if api_key is not None:
                known.api_key = api_key
            if known.source == MANAGEMENT != source:  # the configuration names it as well from here on
                known.source, known.api_key = source, known.api_key or key
            return known
        limit = self._settings.max_concurrent_per_worker
        breaker = Breaker(self._settings)
        most = None if limit == UNLIMITED else limit
        worker = Worker(url, breaker, key, source, limit=most, bootstrap_port=bootstrap_port)
        self._workers[worker.id] = worker
        log.info("worker %s at %s is known (%s)", worker.id, url, source)
        for listener in self._listeners:
            listener.added(worker)
        return worker

    def remove(self, worker: Worker) -> None:
        """The worker gets no more requests; running ones may finish."""
        if self._workers.pop(worker.id, None) is None:
            return
        worker.removed = True
        worker.in_rotation = False
        self._forget()
        log.info("worker %s at %s is removed", worker.id, worker.url)
        for listener in self._listeners:
            listener.removed(worker)

    def drain(self, worker: Worker, draining: bool = True) -> None:
        if worker.draining != draining:
            worker.draining = draining
            log.info("worker %s at %s %s", worker.id, worker.url, "drains" if draining else "is let in again")
            self.notify_changed(worker)

    def enter_rotation(self, worker: Worker) -> None:
        worker.in_rotation = worker.ever_healthy = True
        worker.ended = False
        worker.last_error = None
        worker.breaker.reset()
        log.info("worker %s at %s is in rotation: %s", worker.id, worker.url, ", ".join(worker.capabilities.models))
        self.notify_changed(worker)

    def leave_rotation(self, worker: Worker, reason: str, *, ended: bool = False) -> None:
        """The worker is considered dead: attempts that can go on elsewhere are called back. `ended`: its process is
        gone."""
        worker.last_error = reason
        worker.ended = worker.ended or ended
        if not worker.in_rotation:
            return
        worker.in_rotation = False
        log.warning("worker %s at %s leaves the rotation: %s", worker.id, worker.url, reason)
        for lease in list(worker.leases):
            lease.call_back()
        self.notify_changed(worker)

    def notify_changed(self, worker: Worker) -> None:
        self._forget()
        for listener in self._listeners:
            listener.changed(worker)

    def _forget(self) -> None:
        self._available.clear()
        self._models = frozenset(model for worker in self._workers.values() for model in worker.capabilities.models)

    def models(self) -> list[str]:
        """Every reported model, also of workers that are out of rotation."""
        return sorted(self._models)

    def knows(self, model: str | None) -> bool:
        return model in self._models

    def serving(self, model: str | None) -> list[Worker]:
        """Those that have the model. A name that none reports may be `model:adapter`, or an adapter or another name
        that the workers of a single model take: then they decide."""
        workers = list(self._workers.values())
        found = [worker for worker in workers if worker.serves(model)]
        if found or model is None:
            return found
        base = model.partition(":")[0]
        one = len({worker.capabilities.models[:1] for worker in workers}) == 1  # a model is listed before its adapters
        return [worker for worker in workers if worker.ever_healthy and (one or worker.serves(base))]

    def available(self, model: str | None) -> list[Worker]:
        """Those that get the model's requests; not to be changed."""
        kept = self._available.get(model)
        if kept is None:
            if len(self._available) >= MOST_MODELS:  # any name, where workers do not say which models they have
                self._available.clear()
            kept = [each for each in self.serving(model) if each.available and each.bootstrap_port is None]
            self._available[model] = kept
        return kept

    def prefills(self, model: str | None) -> list[Worker]:
        """Those that compute prompts for others."""
        return [each for each in self.serving(model) if each.available and each.bootstrap_port is not None]


def normal_url(url: str) -> str:
    """`http://host:port`, with the path that a proxy may need and no slash at the end."""
    text = url.strip().rstrip("/")
    if "://" not in text:
        text = f"http://{text}"
    try:
        parts = urlsplit(text)
        (parts.hostname or "").encode("idna")  # as the client will write it: an empty or too long part is refused here
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not re.search(r"\s", text)
    except ValueError:
        usable = None
    if not usable or parts.query or parts.fragment or parts.username:
        raise SettingsError(f"The URL of a server looks like http://host:port; got {url!r}.")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path}"


def checked_key(key: str | None) -> str | None:
    if key is not None and not (key.isascii() and key.isprintable()):
        raise SettingsError("A worker's key is made of printable ASCII characters: it is sent in a header.")
    return key
