"""A worker as `/workers` shows it; its key is never shown."""

from __future__ import annotations

import time
from typing import Any

from bough.gateway.worker import Worker


def worker_json(worker: Worker) -> dict[str, Any]:
    known = worker.capabilities
    return {
        "id": worker.id,
        "url": worker.url,
        "model_id": known.models[0] if known.models else None,
        "models": list(known.models),
        "is_healthy": worker.in_rotation,
        "state": worker.state.value,
        "load": worker.load,
        "reported_load": worker.reported_load,
        "capacity": known.capacity,
        "limit": worker.limit,
        "breaker": worker.breaker.state(time.monotonic()).name.lower(),
        "source": worker.source,
        "version": known.version,
        "pid": worker.pid,
        "restarts": worker.restarts,
        "last_error": worker.last_error,
    }
