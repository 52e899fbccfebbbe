"""What is written of each request: lines in the log (`--log-requests`) and spans for OpenTelemetry (`--otlp-endpoint`).

Lines show what a request is made of, never how it was let in: headers and keys are not known here. Texts and ids are
the callers', so they are quoted: none of them can end a line and begin another. OpenTelemetry's packages are an
optional extra and are imported only when an endpoint is given. The parent of a span is what the client says in its
`traceparent` header.
"""

from __future__ import annotations

import importlib
import logging
import time
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from bough.client.outputs import RequestOutput
from bough.core.errors import SettingsError
from bough.core.finish import FinishAbort
from bough.messages.requests import ProcessCommand
from bough.observability.logs import current_request
from bough.observability.metrics import State
from bough.observability.timeline import REQUESTS
from bough.tokenizer.tokenizer import Tokenizer
from bough.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

log = logging.getLogger(__name__)

SAMPLING, TEXT_BEGINNINGS, WHOLE_TEXTS = 1, 2, 3  # what each level of the log adds to the sizes and times of level 0
SHOWN = 2048  # characters, or token ids, of a text that is not shown whole

PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
DEFAULT_PATH = "/v1/traces"  # where collectors listen, for an endpoint without a path
EXPORT_TIMEOUT_S = 5.0  # a collector that does not answer may hold up the end of the server for that long
NS = 1_000_000_000
SAME_CLOCK_S = 1.0  # clocks that differ by more are those of two machines


@dataclass(slots=True)
class RequestLogging:
    """Whether an HTTP process logs its requests, and how much of them; /configure_logging changes it."""

    on: bool = False
    level: int = TEXT_BEGINNINGS

    def obey(self, command: ProcessCommand) -> None:
        self.on = self.on if command.log_requests is None else command.log_requests
        self.level = self.level if command.log_requests_level is None else command.log_requests_level


class RequestLog:
    def __init__(self, logging: RequestLogging, tokenizer: Tokenizer | None) -> None:
        self._logging = logging
        self._tokenizer = tokenizer

    def arrived(self, answer: RequestOutput) -> None:
        if not self._logging.on:
            return
        prompt = answer.prompt
        parts = [f"{len(prompt.ids)} prompt tokens"]
        if self._logging.level >= SAMPLING:
            parts.append(f"sampling {msgspec.to_builtins(prompt.sampling)}")  # what is not at its default
        if self._logging.level >= TEXT_BEGINNINGS:
            ids = self._cut(prompt.shown_ids).tolist()
            text = None if self._tokenizer is None else self._tokenizer.decode(ids, skip_special_tokens=False)
            parts.append(f"prompt {ids if text is None else self._cut(text)!r}")
        log.info("request %r came: %s", prompt.rid, ", ".join(parts))

    def ended(self, answer: RequestOutput) -> None:
        if not self._logging.on:
            return
        timings = answer.timings
        times = {
            "queue": timings.queue_s,
            "prefill": timings.prefill_s,
            "first token": timings.time_to_first_token_s,
            "total": timings.total_s,
        }
        parts = [
            f"{answer.prompt_tokens} prompt tokens ({answer.cached_tokens} cached)",
            f"{answer.new_tokens} output tokens",
            *(f"{name} {seconds * 1000:.1f} ms" for name, seconds in times.items()),
        ]
        if self._logging.level >= TEXT_BEGINNINGS:
            parts.append(f"output {self._cut(answer.ids if self._tokenizer is None else answer.text)!r}")
        log.info("request %r ended (%s): %s", answer.prompt.rid, finish_word(answer), ", ".join(parts))

    def _cut(self, shown: Any) -> Any:
        return shown if self._logging.level >= WHOLE_TEXTS else shown[:SHOWN]


def finish_word(answer: RequestOutput) -> str:
    """How a request ended, in a word or two; what stopped it is part of its text."""
    if answer.finish is None:
        return "left by its client" if answer.error is None else "the engine has ended"
    if isinstance(answer.finish, FinishAbort):
        return f"{answer.finish.err_type} {answer.finish.status_code}"
    return answer.finish.kind


def check_tracing(endpoint: str | None) -> None:
    """Raises what would keep traces from being sent, before anything is started."""
    if endpoint is None:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"--otlp-endpoint must be a URL such as http://localhost:4318, got {endpoint!r}.")
    try:
        for package in PACKAGES:
            importlib.import_module(package)
    except ImportError:
        raise SettingsError("--otlp-endpoint needs the OpenTelemetry packages: pip install 'bough[otel]'.") from None


def otlp_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    path = urlsplit(endpoint).path
    url = endpoint.rstrip("/") + DEFAULT_PATH if path in ("", "/") else endpoint
    return OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)


def span_provider(exporter: SpanExporter, service: str) -> TracerProvider:
    """Makes spans, which are exported in the background."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": service, "service.version": __version__}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class RecentRequests:
    """What this process knows of its last requests, for the page's timelines: how long they were read and tokenised,
    and when their last text arrived. A watcher of the engine's client. Owns their times, by handle."""

    def __init__(self) -> None:
        self._times: dict[int, tuple[float, float, float | None, str]] = {}

    def arrived(self, answer: RequestOutput) -> None:
        self._keep(answer, "")

    def ended(self, answer: RequestOutput) -> None:
        self._keep(answer, finish_word(answer))

    def _keep(self, answer: RequestOutput, finish: str) -> None:
        sent = answer.received_at
        self._times[answer.handle] = (current_request.get()[1] or sent, sent, answer.finished_at, finish)
        if len(self._times) > 2 * REQUESTS:
            del self._times[next(iter(self._times))]

    def complete(self, replica: State) -> State:
        """What a scheduler recorded, with what came before it and after it of this process's requests."""
        if abs(time.perf_counter() - replica["now"]) > SAME_CLOCK_S:
            return replica
        return {**replica, "requests": list(map(self._complete, replica["requests"]))}

    def _complete(self, request: dict[str, Any]) -> dict[str, Any]:
        began, sent, finished, finish = self._times.get(request["id"], (request["arrived"], 0.0, None, ""))
        if sent:
            request["stages"] = [("tokenise", sent, 0), ("hand over", request["arrived"], 0), *request["stages"]]
        if finished is not None:
            request["stages"].append(("detokenise", finished, 0))
        return request | {"arrived": began, "finish": finish}


class RequestTraces:
    """Makes a span for each request, with its time in queue, prefill and decode. A watcher of the engine's client. Owns
    the open spans."""

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        self._provider = span_provider(exporter, "bough")
        self._tracer = self._provider.get_tracer("bough", __version__)
        self._model_name = model_name
        self._open: dict[int, tuple[Span, int]] = {}  # by handle, with its beginning in nanoseconds

    def arrived(self, answer: RequestOutput) -> None:
        began = time.time_ns()
        self._open[answer.handle] = self._tracer.start_span("generate", start_time=began), began

    def ended(self, answer: RequestOutput) -> None:
        from opentelemetry.trace import StatusCode

        span, began = self._open.pop(answer.handle)
        timings = answer.timings
        span.set_attributes(
            {
                "bough.rid": answer.prompt.rid,
                "bough.request_id": current_request.get()[0],
                "bough.cached_tokens": answer.cached_tokens,
                "gen_ai.operation.name": "text_completion",
                "gen_ai.response.id": answer.prompt.rid,
                "gen_ai.response.model": self._model_name,
                "gen_ai.response.finish_reasons": (finish_word(answer),),
                "gen_ai.usage.input_tokens": answer.prompt_tokens,
                "gen_ai.usage.output_tokens": answer.new_tokens,
            }
        )
        if isinstance(answer.finish, FinishAbort):
            span.set_status(StatusCode.ERROR, answer.finish.message)
        if answer.started:
            self._add_stages(span, began, (timings.queue_s, timings.prefill_s, timings.decode_s))
        span.end(began + int(timings.total_s * NS))

    def close(self) -> None:
        """Sends what is left; blocks until it is sent."""
        self._provider.shutdown()

    def _add_stages(self, span: Span, began: int, seconds: tuple[float, float, float]) -> None:
        from opentelemetry.trace import set_span_in_context

        parent = set_span_in_context(span)
        bounds = [began + int(after * NS) for after in accumulate(seconds, initial=0.0)]
        for name, (start, end) in zip(("queue", "prefill", "decode"), pairwise(bounds), strict=True):
            self._tracer.start_span(name, parent, start_time=start).end(end)


def with_tracing(app: ASGIApp, endpoint: str | None) -> ASGIApp:
    """Puts every request under the span that its client names; the application as it is when there are no traces."""
    if endpoint is None:
        return app
    from opentelemetry import context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()

    async def traced(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        token = context.attach(propagator.extract(headers))
        try:
            await app(scope, receive, send)
        finally:
            context.detach(token)

    return traced
