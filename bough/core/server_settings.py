"""Settings of what listens: the server, which is a group of `Settings`, and what it shares with the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from bough.core.setting_checks import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """A listening socket and who may use it: of the server and of the gateway."""

    host: str = setting("127.0.0.1", "address to listen on; 0.0.0.0 or :: for all of this machine's")
    port: int = setting(30000, "port to listen on", low=0, high=65535)
    uds: str | None = setting(None, "path of a unix socket to listen on, instead of host and port")
    ssl_certfile: str | None = setting(None, "certificate (PEM); with it the server speaks HTTPS")
    ssl_keyfile: str | None = setting(None, "the certificate's private key (PEM)")
    disable_ui: bool = setting(False, "serve no page at /ui")
    allowed_origins: str | None = setting(
        None,
        "origins whose web pages may call the server (CORS), separated by commas, or *; only its own when left out",
    )
    allowed_hosts: str | None = setting(
        None,
        "accepted values of the Host header besides localhost, separated by commas, or *; checked when given, and on "
        "loopback addresses",
    )
    body_timeout_s: float = setting(60.0, "time limit for each 64 KiB of a request body, and for its end", low=1.0)
    max_bodies_mb: int | None = setting(
        None,
        "memory for all request bodies of a process together, in MiB; a request beyond it gets 503; when left out "
        "twice --max-body-mb, for a server at least 1024",
        low=2,
    )
    forwarded_allow_ips: str = setting(
        "127.0.0.1", "addresses and networks of proxies whose X-Forwarded-* headers are trusted, or *"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(EdgeSettings):
    """The HTTP server of `bough serve`."""

    root_path: str = setting("", "path under which a proxy serves this server")
    api_key: str | None = setting(None, "key that clients must send; BOUGH_API_KEY keeps it out of the process list")
    admin_api_key: str | None = setting(None, "key for the management routes; then --api-key does not open those")
    max_body_mb: int = setting(64, "largest request body, in MiB", low=1)
    strict_fields: bool = setting(False, "refuse requests with unknown fields; otherwise the response has warnings")
    tokenizer_worker_num: int = setting(1, "HTTP and tokenizer processes on the one port", low=1, high=64)
    log_requests: bool = setting(False, "log a line when a request arrives and one when it ends: id, sizes, times")
    log_requests_level: int = setting(
        2,
        "what these lines also show: 1 sampling parameters, 2 also the beginning of texts, 3 whole texts",
        choices=(0, 1, 2, 3),
    )
    otlp_endpoint: str | None = setting(
        None, "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of each request; needs bough[otel]"
    )
    enable_metrics: bool = setting(False, "accepted for SGLang's users; /metrics is always on")
    metrics_names: str = setting(
        "bough",
        "whose metric names /metrics uses, for dashboards and autoscalers made for another engine",
        choices=("bough", "sglang", "vllm"),
    )
    enable_cache_report: bool = setting(False, "accepted for SGLang's users; responses always contain cached tokens")
    skip_server_warmup: bool = setting(False, "accepted for SGLang's users; the port opens at once in any case")
    crash_dump_folder: str | None = setting(
        None, "folder for the requests of the last five minutes if the engine dies, for `bough replay`"
    )
    watchdog_timeout: float = setting(
        300.0, "seconds without progress after which the engine counts as stuck; 0: never", low=0.0
    )
    drain_timeout_s: float = setting(60.0, "how long running requests may take after the server is told to stop", low=0)
