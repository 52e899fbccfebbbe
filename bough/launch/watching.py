"""Those who watch the requests of one HTTP process: its meter always, its log and its traces where they are wanted."""

from __future__ import annotations

import contextlib

from bough.client.handle import EngineClient, RequestWatcher
from bough.core.settings import Settings
from bough.launch.aside import in_thread
from bough.launch.client_end import ClientEnd
from bough.observability.request_meter import RequestMeter
from bough.server.request_log import RequestLog
from bough.server.tracing import RequestTraces, otlp_exporter
from bough.tokenizer.tokenizer import Tokenizer


def connect_watched(
    end: ClientEnd,
    tokenizer: Tokenizer | None,
    settings: Settings,
    model_name: str,
    cleanup: contextlib.AsyncExitStack,
) -> EngineClient:
    """The client of an HTTP process, and its watchers."""
    server = settings.server
    watchers: list[RequestWatcher] = []
    if server.log_requests:
        watchers.append(RequestLog(server.log_requests_level, tokenizer))
    if server.otlp_endpoint is not None:
        traces = RequestTraces(otlp_exporter(server.otlp_endpoint), model_name)
        cleanup.push_async_callback(in_thread, traces.close)
        watchers.append(traces)
    return end.connect(tokenizer, RequestMeter(end.folder, end.number), watchers)
