"""Every metric: its name, kind and buckets. Names are SGLang's with our prefix.

`request_meter` counts the request metrics; the scheduler's are read from its state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

PREFIX = "bough:"
# Names on the page that differ from ours by more than the prefix, by whose names they are (`--metrics-names`).
OTHER_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "bough": {},
    "sglang": {},
    "vllm": {
        "num_running_reqs": ("num_requests_running",),
        "num_queue_reqs": ("num_requests_waiting",),
        "token_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
        "num_retracted_requests_total": ("num_preemptions_total",),
        "num_requests_total": ("request_success_total",),  # which counts aborted ones, too
        "queue_time_seconds": ("request_queue_time_seconds",),
        "prompt_tokens_histogram": ("request_prompt_tokens",),
        "generation_tokens_histogram": ("request_generation_tokens",),
        "prompt_tokens_total": ("prompt_tokens_total", "prefix_cache_queries_total"),
        "cached_tokens_total": ("prefix_cache_hits_total",),
        "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    },
}
State = Mapping[str, Any]  # the scheduler's reply to `GetState`

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
LONG_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
# From a small model on a fast device, whose tokens are half a millisecond apart, to a large one on a busy CPU.
TOKEN_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
TOKENS = tuple(float(2**power) for power in range(4, 18))  # 16 to 131,072
RETRACTIONS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0)


@dataclass(frozen=True, slots=True, eq=False)  # there is one of each: compared by identity, which is quick
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    about: str
    buckets: tuple[float, ...] = ()
    read: Callable[[State], float | None] | None = None  # of the scheduler: from its state, if not by its name
    label: str = ""  # what tells its numbers apart, where it has several

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def names_of(metric: Metric, style: str) -> list[str]:
    """What a metric is called on a page in another engine's names; some have two there."""
    return [f"{style}:{name}" for name in OTHER_NAMES[style].get(metric.name, (metric.name,))]


def _gauge(name: str, about: str, read: Callable[[State], float | None] | None = None) -> Metric:
    return Metric(name, "gauge", about, read=read)


def _counter(name: str, about: str) -> Metric:
    return Metric(name, "counter", about)


PROMPT_TOKENS_TOTAL = Metric("prompt_tokens_total", "counter", "Prompt tokens of requests that got their first token.")
GENERATION_TOKENS_TOTAL = Metric("generation_tokens_total", "counter", "Tokens generated.")
CACHED_TOKENS_TOTAL = Metric("cached_tokens_total", "counter", "Prompt tokens that were found in the prefix cache.")
NUM_REQUESTS_TOTAL = Metric("num_requests_total", "counter", "Requests that have ended, in whatever way.")
NUM_ABORTED_REQUESTS_TOTAL = Metric(
    "num_aborted_requests_total",
    "counter",
    "Requests that ended incomplete: aborted, left by their client, refused or timed out.",
)
TIME_TO_FIRST_TOKEN = Metric(
    "time_to_first_token_seconds", "histogram", "From the arrival of a request to its first token.", SECONDS
)
INTER_TOKEN_LATENCY = Metric(
    "inter_token_latency_seconds", "histogram", "Between two tokens of a request.", TOKEN_SECONDS
)
E2E_REQUEST_LATENCY = Metric(
    "e2e_request_latency_seconds", "histogram", "From the arrival of a request to its end.", LONG_SECONDS
)
QUEUE_TIME = Metric("queue_time_seconds", "histogram", "That a request waited before it was first run.", SECONDS)
PROMPT_TOKENS = Metric("prompt_tokens_histogram", "histogram", "Prompt tokens of a request.", TOKENS)
GENERATION_TOKENS = Metric("generation_tokens_histogram", "histogram", "Tokens generated for a request.", TOKENS)
NUM_RETRACTIONS = Metric(
    "num_retractions", "histogram", "How often a request lost its place to others for want of memory.", RETRACTIONS
)
MEDIA_BYTES_TOTAL = _counter("media_bytes_total", "Bytes of images, video and sound in requests.")
MEDIA_PREPARED_SECONDS = Metric(
    "media_preparation_seconds", "histogram", "For decoding and preparing an image, a clip or a recording.", SECONDS
)
MEDIA_CACHE_HITS_TOTAL = _counter("media_cache_hits_total", "Media that were found prepared.")
HTTP_REQUESTS_ACTIVE = _gauge("http_requests_active", "HTTP requests in progress, those for /metrics left out.")

REQUEST_METRICS = (
    HTTP_REQUESTS_ACTIVE,
    PROMPT_TOKENS_TOTAL,
    GENERATION_TOKENS_TOTAL,
    CACHED_TOKENS_TOTAL,
    NUM_REQUESTS_TOTAL,
    NUM_ABORTED_REQUESTS_TOTAL,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    E2E_REQUEST_LATENCY,
    QUEUE_TIME,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    NUM_RETRACTIONS,
    MEDIA_BYTES_TOTAL,
    MEDIA_PREPARED_SECONDS,
    MEDIA_CACHE_HITS_TOTAL,
)


def _transfers(name: str, about: str) -> Metric:
    return Metric(f"disaggregation_{name}_total", "counter", about, read=lambda s: s[name])


STATE_METRICS = (
    _gauge("num_running_reqs", "Requests that are running."),
    _gauge("num_queue_reqs", "Requests that wait for their turn.", lambda s: s["num_waiting_reqs"]),
    _gauge("num_retracted_reqs", "Those of them that have run before, and lost their place."),
    _gauge("num_grammar_queue_reqs", "Requests whose grammar is being compiled."),
    _gauge("num_used_tokens", "Tokens of the KV cache that running requests hold."),
    _gauge("max_total_num_tokens", "Tokens that the KV cache can hold."),
    _gauge(
        "token_usage",
        "Share of the KV cache that running requests hold.",
        lambda s: s["num_used_tokens"] / max(s["max_total_num_tokens"], 1),
    ),
    _gauge(
        "cache_hit_rate",
        "Share of all prompt tokens since the start that were found in the prefix cache.",
        lambda s: s["cached_tokens"] / max(s["prompt_tokens"], 1),
    ),
    _gauge(
        "gen_throughput",
        "Tokens generated per second, over the last --decode-log-interval steps; 0 when nothing runs.",
        lambda s: s["last_gen_throughput"] if s["num_running_reqs"] else 0.0,
    ),
    _gauge(
        "new_token_ratio", "Share of its token limit that a request is expected to use, by which requests are admitted."
    ),
    _gauge(
        "spec_accept_length",
        "Tokens that a decode gave on average since the start: 1 and the drafts that held.",
        lambda s: 1.0 + s["spec_num_correct_drafts"] / max(s["spec_verify_ct"], 1),
    ),
    _gauge(
        "spec_accept_rate",
        "Share of all drafts since the start that held.",
        lambda s: s["spec_num_correct_drafts"] / max(s["spec_num_proposed_drafts"], 1),
    ),
    Metric(
        "kv_read_bytes_total",
        "counter",
        "Keys and values that decodes attended to, counted for each request.",
        read=lambda s: s["kv_read_bytes"],
    ),
    Metric(
        "kv_read_saved_bytes_total",
        "counter",
        "Those of them that a request next to it in the step attended to as well: read once where that pays.",
        read=lambda s: s["kv_shared_bytes"],
    ),
    _gauge("device_busy_share", "Share of time in which the device computed, pauses without work left out."),
    Metric(
        "num_retracted_requests_total",
        "counter",
        "Times that a request lost its place for want of memory.",
        read=lambda s: s["num_retractions"],
    ),
    # Of --enable-hierarchical-cache alone.
    _gauge("hicache_host_used_tokens", "Tokens whose keys and values the host's memory holds."),
    _gauge("hicache_host_total_tokens", "Tokens that the host's memory can hold."),
    _counter("load_back_tokens_total", "Tokens that were found in the host's memory and copied to the device."),
    _counter("hicache_bytes_in_total", "Bytes of pages that were copied from the host to the device."),
    _counter("hicache_bytes_out_total", "Bytes of pages that were copied from the device to the host."),
    _counter("hicache_evicted_tokens_total", "Tokens that left the host's memory to make room."),
    _counter("hicache_storage_read_tokens_total", "Tokens whose keys and values were read from the store."),
    _counter("hicache_storage_written_tokens_total", "Tokens whose keys and values were written to the store."),
    _counter("hicache_storage_dropped_runs_total", "Runs of 256 tokens that could not be stored."),
    _counter("hicache_storage_corrupt_runs_total", "Runs that were damaged in the store, and computed anew."),
    _counter("hicache_storage_failures_total", "Times that the store did not do what it was asked."),
    Metric(
        "evicted_tokens_total",
        "counter",
        "Tokens that left the prefix cache to make room.",
        read=lambda s: s["num_evicted_tokens"],
    ),
    # Of prefill and decode engines.
    _transfers("transfers", "Prompts whose pages were handed over."),
    _transfers("transferred_bytes", "Bytes of those pages."),
    _transfers("failed_transfers", "Prompts that were not handed over: an engine or a client was lost, or refused."),
)

REALTIME_TOKENS = Metric(
    "realtime_tokens_total", "counter", "Tokens of each step, counted when the step has run.", label="mode"
)
FORWARD_SECONDS = Metric(
    "forward_execution_seconds_total", "counter", "Seconds in which the device ran steps.", label="category"
)
PROCESS_CPU_SECONDS = Metric(
    "process_cpu_seconds_total", "counter", "CPU seconds of the server's processes.", label="component"
)

# What the scheduler announces once, when it is ready.
START_METRICS = (
    _gauge("weight_memory_usage_gb", "GiB that the weights take.", lambda s: s["memory_usage"]["weight"]),
    _gauge("kv_cache_memory_usage_gb", "GiB that the KV cache takes.", lambda s: s["memory_usage"]["kvcache"]),
    _gauge("weight_load_duration_seconds", "For reading the weights.", lambda s: s["startup_time"]["load_weight"]),
)
STARTUP_TIME = Metric("startup_time_seconds", "gauge", "That the start of the server took.", label="phase")

LABELLED_METRICS = (REALTIME_TOKENS, FORWARD_SECONDS, PROCESS_CPU_SECONDS, STARTUP_TIME)
ALL_METRICS = (*REQUEST_METRICS, *STATE_METRICS, *LABELLED_METRICS, *START_METRICS)


def state_figures(state: State) -> dict[str, float]:
    """Without what this engine does not have."""
    read = {metric.name: metric.read(state) if metric.read else state.get(metric.name) for metric in STATE_METRICS}
    return {name: value for name, value in read.items() if value is not None}


def start_figures(limits: State) -> dict[str, float]:
    """Of an engine that announced them; else none."""
    if not {"memory_usage", "startup_time"} <= limits.keys():
        return {}
    read = {metric.name: metric.read(limits) for metric in START_METRICS if metric.read is not None}
    return {name: value for name, value in read.items() if value is not None}
