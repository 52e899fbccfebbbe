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
BOOTSTRAP_PORT = 8998  # of a prefill engine that does not name another


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings(EdgeSettings):
    """Many engines behind one address."""

    max_body_mb: int = setting(512, "largest request body, in MiB", low=1)
    admin_api_key: str | None = setting(
        None, "key for the management routes; with client keys and without this one, management is refused"
    )
    worker_api_key: str | None = setting(
        None,
        "key that the gateway sends to workers that have none of their own: those of --worker-urls, --launch, the "
        "configuration file and --service-discovery, never one that was added over HTTP",
    )
    kv_events_key_file: str | None = setting(
        None, "the `key_file` of workers whose cache events are closed to who does not hold it; policy kv_events"
    )
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
        "how a worker is chosen, for models without a policy of their own: random, round_robin, power_of_two, "
        "least_loaded, consistent_hashing, prefix_hash, cost, cache_aware or kv_events; cost when left out",
    )
    pd_disaggregation: bool = setting(False, "prompts are computed by the engines of --prefill, answers by --decode")
    prefill_policy: str | None = setting(None, "how a prefill engine is chosen; as --policy when left out")
    decode_policy: str | None = setting(None, "the --policy for decode engines")
    launch: int = setting(0, "start this many engines on this machine; flags after -- are theirs", low=0)
    processes: int = setting(1, "processes that serve on the one port", low=1, high=64)
    service_discovery: bool = setting(False, "take Kubernetes pods with the labels of --selector as workers")
    service_discovery_port: int = setting(30000, "port of the engines in those pods", low=1, high=65535)
    service_discovery_namespace: str | None = setting(None, "namespace of those pods; all namespaces when left out")
    grpc_port: int | None = setting(None, "port of the gRPC front; none when left out", low=0, high=65535)
    max_concurrent_requests: int = setting(UNLIMITED, "requests at workers at once; -1 for any number", low=-1)
    max_concurrent_per_worker: int = setting(UNLIMITED, "requests at one worker at once; -1 for any number", low=-1)
    queue_size: int = setting(100, "requests that may wait for their turn; one more is refused with 429", low=0)
    queue_timeout_secs: float = setting(60.0, "a request that waits longer for its turn gets 408", low=0.0)
    rate_limit_rps: float | None = setting(
        None, "requests per second, over all clients; any number if absent", low=0.001
    )
    rate_limit_burst: float | None = setting(
        None, "requests that may come at once after a quiet while; as many as --rate-limit-rps when left out", low=1.0
    )
    request_timeout_secs: float = setting(1800.0, "a request that takes longer ends with 504", low=0.0)
    attempt_timeout_secs: float | None = setting(
        None,
        "an answer that is not whole by then, or a stream not begun, is asked of another worker; off if absent",
        low=0.001,
    )
    hedge_after_secs: float | None = setting(
        None, "when no answer has begun by then, a second worker is asked as well; the first answer counts", low=0.001
    )
    retry_max_retries: int = setting(5, "further attempts for a request whose answer has not begun", low=0)
    retry_initial_backoff_ms: float = setting(50.0, "pause before the first of them", low=0.0)
    retry_max_backoff_ms: float = setting(30_000.0, "longest pause", low=0.0)
    retry_backoff_multiplier: float = setting(1.5, "how much longer each pause is than the one before", low=1.0)
    retry_jitter_factor: float = setting(0.2, "share by which a pause may be longer or shorter", low=0.0, high=1.0)
    retry_budget_ratio: float = setting(
        0.2, "further attempts allowed per request on average, beside a few; no storm of retries", low=0.0
    )
    cb_failure_threshold: int = setting(10, "failures in a row that open a worker's circuit breaker", low=1)
    cb_success_threshold: int = setting(3, "successes that close it again", low=1)
    cb_timeout_duration_secs: float = setting(60.0, "how long it stays open before a request is tried", low=0.0)
    cb_window_duration_secs: float = setting(120.0, "failures further apart than this do not add up", low=0.0)
    health_check_interval_secs: float = setting(60.0, "time between two checks of a worker in rotation", low=0.01)
    health_check_timeout_secs: float = setting(5.0, "a check without an answer by then has failed", low=0.01)
    health_failure_threshold: int = setting(3, "failed checks in a row that take a worker out of rotation", low=1)
    health_success_threshold: int = setting(2, "passed checks in a row that bring it in again", low=1)
    worker_startup_timeout_secs: float = setting(
        1800.0, "an engine of --launch that is not ready by then is ended and started again", low=1.0
    )
    drain_timeout_s: float = setting(180.0, "how long requests may go on when the gateway is told to stop", low=0.0)
    otlp_endpoint: str | None = setting(
        None, "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span of each request; needs bough[otel]"
    )
    access_log: bool = setting(False, "a line of JSON on standard error for each request")
    log_level: str = setting("info", "what is logged", choices=("debug", "info", "warning", "error"))

    @property
    def default_policy(self) -> str:
        return self.decode_policy or self.policy or "cost"

    @property
    def default_policy_options(self) -> dict[str, Any]:
        """Several processes do not see each other's requests, so `cost` lets them agree on a worker by a hash."""
        return {"home_share": 0.5} if self.default_policy == "cost" and self.processes > 1 else {}


def gateway_fields() -> list[dataclasses.Field[Any]]:
    """Every setting of one value, in the order of the help page; the two lists have flags of their own kind."""
    return [f for f in dataclasses.fields(GatewaySettings) if f.metadata]
