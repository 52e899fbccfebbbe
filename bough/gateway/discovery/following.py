"""Keeps the registry as a source of workers says: those that come are added, those that go are removed."""

from __future__ import annotations

from bough.gateway.discovery.interface import WorkerSource
from bough.gateway.registry import Registry, normal_url
from bough.gateway.worker import worker_id


async def follow(source: WorkerSource, registry: Registry, name: str) -> None:
    """Until it is cancelled. What somebody else has added is never removed: `name` marks the source's own."""
    async for change in source.changes():
        if change.kind == "add":
            registry.add(change.url, source=name)
            continue
        worker = registry.get(worker_id(normal_url(change.url)))
        if worker is not None and worker.source == name:
            registry.remove(worker)
