"""Spans of the gateway."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bough.gateway import core
from bough.gateway.tracing import GatewayTraces
from tests.fakes.gateways import desk
from tests.fakes.workers import FakeWorker, workers

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def test_the_worker_is_told_the_gateways_span_whose_parent_is_the_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(core, "traces_to", lambda endpoint: GatewayTraces(exporter))

    async def main() -> None:
        async with workers(FakeWorker()) as (fake,), desk(fake) as d:
            headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
            await d.post("/v1/completions", {"prompt": "x"}, headers=headers)
            told = fake.requests[-1][1]["traceparent"]
        (span,) = exporter.get_finished_spans()
        assert span.context is not None and span.parent is not None
        assert told == f"00-{TRACE}-{span.context.span_id:016x}-01"
        assert f"{span.parent.span_id:016x}" == "00f067aa0ba902b7"
        assert span.attributes is not None and span.attributes["bough.worker"] == fake.url

    asyncio.run(main())
