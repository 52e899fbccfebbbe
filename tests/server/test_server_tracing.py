"""Traces: a span for each request, under the client's own, with its stages; nothing at all without an endpoint."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bough.core.errors import SettingsError
from bough.core.finish import FinishAbort
from bough.server import tracing
from bough.server.app import App, Front
from bough.server.protocols import all_endpoints
from bough.server.tracing import RequestTraces, check_tracing, otlp_exporter, with_tracing
from tests.server.native_engine import NativeEngine, Play

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": "mine"}


def spans_of(play: Play, headers: dict[str, str], body: dict[str, object]) -> dict[str, ReadableSpan]:
    async def go() -> tuple[ReadableSpan, ...]:
        engine = NativeEngine(lambda message: (97,) if message.rid.startswith("HEALTH_CHECK") else play)
        exporter = InMemorySpanExporter()
        traces = RequestTraces(exporter, "tiny")
        engine.watchers.append(traces)
        context = engine.context()
        front = Front()
        front.open(with_tracing(App(all_endpoints(context), context.settings.server), "http://collector"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=front), base_url="http://bough") as http:
            await http.post("/generate", json=body, headers=headers)
            await http.get("/health_generate")
        traces.close()
        return exporter.get_finished_spans()

    return {span.name: span for span in asyncio.run(go())}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_under_its_clients_with_its_stages(stream: bool) -> None:
    spans = spans_of([97, 98], PARENT, {"text": "four", "rid": "r1", "stream": stream})
    assert spans.keys() == {"generate", "queue", "prefill", "decode"}
    span = spans["generate"]
    assert span.parent is not None and f"{span.parent.span_id:016x}" == SPAN
    assert all(f"{each.context.trace_id:032x}" == TRACE for each in spans.values())
    assert span.attributes == {
        "bough.rid": "r1",
        "bough.request_id": "mine",
        "bough.cached_tokens": 1,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.response.id": "r1",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 2,
    }
    stages = [spans[name] for name in ("queue", "prefill", "decode")]
    assert all(stage.parent is not None and stage.parent.span_id == span.context.span_id for stage in stages)
    bounds = [span.start_time, *(time for stage in stages for time in (stage.start_time, stage.end_time))]
    assert bounds == sorted(bounds)  # type: ignore[type-var]


def test_without_a_parent_a_request_is_a_trace_of_its_own_and_a_refusal_an_error() -> None:
    spans = spans_of(FinishAbort("full", 429, "QueueFullError"), {}, {"text": "four"})
    assert spans.keys() == {"generate"} and spans["generate"].parent is None
    assert not spans["generate"].status.is_ok and spans["generate"].status.description == "full"


def test_nothing_of_it_is_loaded_without_an_endpoint() -> None:
    async def app(scope: object, receive: object, send: object) -> None:
        return

    assert with_tracing(app, None) is app
    check_tracing(None)
    code = "import sys, bough.server.tracing, bough.launch.service; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_what_cannot_work_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    check_tracing("http://localhost:4318")
    for wrong in ("localhost:4317", "grpc://host:1", "http://"):
        with pytest.raises(SettingsError, match="must be a URL"):
            check_tracing(wrong)
    monkeypatch.setattr(tracing, "PACKAGES", ("opentelemetry.sdk", "not_there.at_all"))
    with pytest.raises(SettingsError, match=r"pip install 'bough\[otel\]'"):
        check_tracing("http://localhost:4318")


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("http://c:4318/v1/traces", "http://c:4318/v1/traces"),
        ("https://c/otlp/in", "https://c/otlp/in"),
    ],
)
def test_an_endpoint_without_a_path_means_the_usual_one(given: str, used: str) -> None:
    assert otlp_exporter(given)._endpoint == used  # type: ignore[attr-defined]
