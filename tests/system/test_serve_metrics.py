"""A real server with two HTTP processes: its counters, log and traces tell what three calls have done."""

from __future__ import annotations

import json
import signal
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from tests.system.serving import PATIENCE_S, TINY, running, until

TRACE = "0af7651916cd43dd8448eb211c80319c"
SECRET = "k3y-of-the-house"


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """An OpenTelemetry collector: its URL, and what it was sent."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            assert self.path == "/v1/traces"
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", received
        finally:
            server.shutdown()
            thread.join()


def scrape(url: str) -> dict[str, float]:
    page = httpx.get(f"{url}/metrics", timeout=PATIENCE_S)
    assert page.status_code == 200
    samples = (s for family in text_string_to_metric_families(page.text) for s in family.samples)
    return {s.name: s.value for s in samples if "le" not in s.labels}


def call(url: str, trace: bool = False, **body: object) -> httpx.Response:
    headers = {"x-api-key": SECRET, **({"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"} if trace else {})}
    return httpx.post(f"{url}/generate", json=body, headers=headers, timeout=PATIENCE_S)


def test_what_was_done_is_counted_logged_and_traced(tiny_model: Path) -> None:
    sampling = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0}
    watching = ("--log-requests", "--log-requests-level", "3", "--enable-metrics", "--api-key", SECRET)
    with collector() as (endpoint, received):
        flags = (*TINY, "--tokenizer-worker-num", "2", "--otlp-endpoint", endpoint, *watching)
        with running(str(tiny_model), *flags) as server:
            prompt = list(range(2, 22))
            plain = call(server.url, input_ids=prompt, sampling_params=sampling, rid="plain", trace=True).json()
            stream = call(server.url, input_ids=prompt, sampling_params=sampling, stream=True).text
            pair = call(server.url, input_ids=[[30, 31, 32], [40, 41]], sampling_params=sampling).json()
            last = json.loads(stream.split("data: ")[-2])
            outputs = [plain, last, *pair]
            cached = sum(output["meta_info"]["cached_tokens"] for output in outputs)
            expected = {
                "bough:num_requests_total": 4,
                "bough:num_aborted_requests_total": 0,
                "bough:prompt_tokens_total": 45,
                "bough:cached_tokens_total": cached,
                "bough:generation_tokens_total": 24,
                "bough:time_to_first_token_seconds_count": 4,
                "bough:inter_token_latency_seconds_count": 20,
                "bough:e2e_request_latency_seconds_count": 4,
                "bough:generation_tokens_histogram_sum": 24,
                "bough:num_running_reqs": 0,
                "bough:num_queue_reqs": 0,
                "bough:max_total_num_tokens": 4096,
                "bough:cache_hit_rate": cached / 45,
                "bough:evicted_tokens_total": 0,
            }
            assert cached >= 19, "the stream finds the plain prompt in the cache"

            def lacking() -> set[tuple[str, float]]:
                """Of whichever process answers."""
                return set().union(*(expected.items() - scrape(server.url).items() for _ in range(8)))

            until(lambda: not lacking(), f"the values of {expected}")
            log = server.log()
            server.tell(signal.SIGTERM)
            assert server.wait() == 0, server.log()
    assert "request 'plain' came: 20 prompt tokens" in log and "request 'plain' ended (length)" in log
    assert SECRET not in log
    spans = [s for request in received for r in request.resource_spans for scope in r.scope_spans for s in scope.spans]
    assert sorted(span.name for span in spans) == sorted(["generate", "queue", "prefill", "decode"] * 4)
    traced = [span for span in spans if span.trace_id.hex() == TRACE]
    assert len(traced) == 4 and any(span.parent_span_id.hex() == "b7ad6b7169203331" for span in traced)


@pytest.mark.slow
def test_logging_and_cpu_seconds_are_those_of_all_processes(tiny_model: Path) -> None:
    with running(str(tiny_model), *TINY, "--tokenizer-worker-num", "2") as server:

        def logged() -> int:
            """How many of some requests that come at the same time, so that both processes get some."""
            rid = uuid.uuid4().hex
            body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
            with ThreadPoolExecutor(16) as pool:
                calls = [pool.submit(call, server.url, rid=f"{rid}-{i}", **body) for i in range(16)]
            assert all(reply.result().status_code == 200 for reply in calls)
            return server.log().count(f"request '{rid}")

        for on, count in ((True, 2 * 16), (False, 0)):
            configured = httpx.post(f"{server.url}/configure_logging", json={"log_requests": on})
            assert configured.status_code == 200, configured.text
            until(lambda count=count: logged() == count, f"{count} lines of 16 requests")
        page = httpx.get(f"{server.url}/metrics").text
        found = {
            sample.labels["component"]: sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "bough:process_cpu_seconds_total"
        }
        assert found.keys() == {"tokenizer", "scheduler", "detokenizer"} and all(found.values())


def test_an_endpoint_that_is_none_is_refused_at_once(tiny_model: Path) -> None:
    with running(str(tiny_model), *TINY, "--otlp-endpoint", "localhost:4317", ready=False) as server:
        assert server.wait() == 2 and "must be a URL" in server.log() and server.log().count("\n") == 1
