"""Every setting of the gateway, with SGLang's names and defaults (but for the size of bodies).

Not a group of `Settings`, because the gateway starts no engine in its process. Flags, `BOUGH_GATEWAY_*` variables and
the `gateway:` section of the configuration file are derived from the fields.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from bough.core.server_settings import EdgeSettings
from bough.core.setting_checks import setting
from bough.core.settings import Settings

UNLIMITED = -1
# Options of routing policies that are flags, too; more are in the configuration file.
POLICY_OPTIONS = (
    "cache_threshold", "balance_abs_threshold", "balance_rel_threshold", "eviction_interval_secs", "max_tree_size",
)  # fmt: skip
BOOTSTRAP_PORT = 8998  # of a prefill engine that does not name another


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(EdgeSettings):
    """Many engines behind one address."""

    max_body_mb: int = setting(512, "largest request body, in MiB", low=1)
    admin_api_key: str | None = setting(None, "key for management, which is refused without it if clients have keys")
    worker_api_key: str | None = setting(
        None, "key that is sent to workers without a key of their own, but never to those that were added over HTTP"
    )
    kv_events_key_file: str | None = setting(None, "key file of workers that encrypt cache events (policy kv_events)")
    worker_urls: tuple[str, ...] = ()
    prefill: tuple[tuple[str, int], ...] = ()  # URLs and bootstrap ports of prefill engines
    config: str | None = None  # a YAML file; its values hold where no flag is given
    engine_flags: tuple[str, ...] = ()  # for the engines that `launch` starts
    engine: Settings = dataclasses.field(default_factory=Settings)  # those flags, and what else those engines read
    launched: tuple[tuple[str, str], ...] = ()  # URLs and keys of those that the gateway's first process has started
    api_keys: tuple[str, ...] = ()
    selector: tuple[str, ...] = ()  # key=value of Kubernetes pods
    given: tuple[str, ...] = ()  # settings that flags or variables gave: they win over the file, also when it changes
    policy: str | None = setting(
        None,
        "how a worker is chosen (default: cost): random, round_robin, power_of_two, least_loaded, consistent_hashing, "
        "prefix_hash, cache_aware, kv_events",
    )
    pd_disaggregation: bool = setting(False, "compute prompts on --prefill engines, answers on --decode engines")
    prefill_policy: str | None = setting(None, "--policy for prefill engines; the same when left out")
    decode_policy: str | None = setting(None, "--policy for decode engines; the same when left out")
    cache_threshold: float | None = setting(None, "for policies that have it: docs/gateway-policies.md", low=0, high=1)
    balance_abs_threshold: int | None = setting(None, "as --cache-threshold", low=0)
    balance_rel_threshold: float | None = setting(None, "as --cache-threshold", low=1)
    eviction_interval_secs: float | None = setting(None, "as --cache-threshold", low=0)
    max_tree_size: int | None = setting(None, "as --cache-threshold", low=1)
    launch: int = setting(0, "start this many engines on this machine; flags after -- are passed to them", low=0)
    processes: int = setting(1, "gateway processes that share the port", low=1, high=64)
    service_discovery: bool = setting(False, "use Kubernetes pods with the labels of --selector as workers")
    service_discovery_port: int = setting(30000, "port of the engines in those pods", low=1, high=65535)
    service_discovery_namespace: str | None = setting(None, "namespace of those pods; all namespaces when left out")
    prometheus_port: int | None = setting(None, "a port for /metrics alone; off by default", low=0, high=65535)
    prometheus_host: str | None = setting(None, "address of --prometheus-port; as --host when left out")
    grpc_port: int | None = setting(None, "port of the gRPC API; none when left out", low=0, high=65535)
    max_concurrent_requests: int = setting(UNLIMITED, "most requests at all workers together; -1: unlimited", low=-1)
    max_concurrent_per_worker: int = setting(UNLIMITED, "most requests at one worker; -1: unlimited", low=-1)
    queue_size: int = setting(100, "most requests in the queue; one more is refused with 429", low=0)
    queue_timeout_secs: float = setting(60.0, "a request that waits longer in the queue gets 408", low=0.0)
    rate_limit_rps: float | None = setting(None, "most requests per second of all clients together", low=0.001)
    rate_limit_burst: float | None = setting(None, "most after a quiet period; as --rate-limit-rps by default", low=1)
    request_timeout_secs: float = setting(1800.0, "a request that takes longer ends with 504", low=0.0)
    attempt_timeout_secs: float | None = setting(
        None, "a worker that has neither answered nor begun a stream by then is given up for another", low=0.001
    )
    hedge_after_secs: float | None = setting(None, "time without an answer until a second worker is asked", low=0.001)
    retry_max_retries: int = setting(5, "most retries of a request whose answer has not begun", low=0)
    retry_initial_backoff_ms: float = setting(50.0, "pause before the first retry", low=0.0)
    retry_max_backoff_ms: float = setting(30_000.0, "longest pause between retries", low=0.0)
    retry_backoff_multiplier: float = setting(1.5, "factor between one pause and the next", low=1.0)
    retry_jitter_factor: float = setting(0.2, "share by which a pause is randomly longer or shorter", low=0.0, high=1.0)
    retry_budget_ratio: float = setting(0.2, "most retries per request on average, beyond a few", low=0.0)
    cb_failure_threshold: int = setting(10, "failures in a row that open a worker's circuit breaker", low=1)
    cb_success_threshold: int = setting(3, "successes that close it", low=1)
    cb_timeout_duration_secs: float = setting(60.0, "how long it stays open before a request is tried", low=0.0)
    cb_window_duration_secs: float = setting(120.0, "failures further apart than this are not added up", low=0.0)
    health_check_endpoint: str = setting("/health", "path that the checks of workers ask for")
    health_check_interval_secs: float = setting(60.0, "time between two checks of a worker in rotation", low=0.01)
    health_check_timeout_secs: float = setting(5.0, "a check without an answer after this time has failed", low=0.01)
    health_failure_threshold: int = setting(3, "failed checks in a row that take a worker out of rotation", low=1)
    health_success_threshold: int = setting(2, "successful checks in a row that bring it back", low=1)
    worker_startup_timeout_secs: float = setting(1800.0, "an engine not ready by then is restarted (--launch)", low=1)
    drain_timeout_s: float = setting(180.0, "how long running requests may take after SIGTERM", low=0.0)
    otlp_endpoint: str | None = setting(None, "URL of an OTLP/HTTP collector for spans of requests; needs bough[otel]")
    access_log: bool = setting(False, "write a JSON line to standard error for each request")
    log_level: str = setting("info", "what is logged", choices=("debug", "info", "warning", "error"))

    @property
    def default_policy(self) -> str:
        return self.decode_policy or self.policy or "cost"

    def options_of(self, policy: str) -> dict[str, Any]:
        """Several processes do not see each other's requests, so `cost` lets them agree on a worker by a hash."""
        shared = {"home_share": 0.5} if policy == "cost" and self.processes > 1 else {}
        return shared | {name: value for name in POLICY_OPTIONS if (value := getattr(self, name)) is not None}


def gateway_fields() -> list[dataclasses.Field[Any]]:
    """Every setting of one value, in the order of the help page; the two lists have flags of their own kind."""
    return [f for f in dataclasses.fields(GatewaySettings) if f.metadata]
