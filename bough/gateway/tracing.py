"""OpenTelemetry spans of proxied requests (`--otlp-endpoint`).

The client's `traceparent` is the parent of the gateway's span, which is the parent of the worker's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bough.gateway.call import Call
from bough.server.tracing import otlp_exporter, span_provider
from bough.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

CONTEXT_HEADERS = frozenset({b"traceparent", b"tracestate"})


class GatewayTraces:
    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = span_provider(exporter, "bough-gateway")
        self._tracer = self._provider.get_tracer("bough.gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, call: Call) -> Span:
        from opentelemetry.trace import SpanKind, set_span_in_context

        given = {name.decode(): value.decode("latin-1") for name, value in call.headers if name in CONTEXT_HEADERS}
        parent = self._propagator.extract(given)
        span = self._tracer.start_span(f"{call.method} {call.path}", parent, kind=SpanKind.SERVER)
        injected: dict[str, str] = {}
        self._propagator.inject(injected, set_span_in_context(span))
        others = [(name, value) for name, value in call.headers if name not in CONTEXT_HEADERS]
        call.headers = [*others, *((name.encode(), value.encode()) for name, value in injected.items())]
        return span

    def end(self, span: Span, call: Call) -> None:
        from opentelemetry.trace import StatusCode

        span.set_attributes(
            {
                "http.response.status_code": call.status,
                "gen_ai.request.model": call.peek.model or "",
                "bough.request_id": call.request_id,
                "bough.worker": call.worker.url if call.worker is not None else "",
                "bough.attempts": call.attempts,
                "bough.failovers": call.failovers,
            }
        )
        if call.error is not None or call.status >= 500:
            span.set_status(StatusCode.ERROR, call.error or "")
        span.end(time.time_ns())

    def close(self) -> None:
        """Sends what is left; blocks meanwhile."""
        self._provider.shutdown()


def traces_to(endpoint: str | None) -> GatewayTraces | None:
    return None if endpoint is None else GatewayTraces(otlp_exporter(endpoint))
