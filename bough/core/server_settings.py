"""Settings of what listens: the server, which is a group of `Settings`, and what it shares with the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from bough.core.setting_checks import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeSettings:
    """A listening socket and who may use it: of the server and of the gateway."""

    host: str = setting("127.0.0.1")
    port: int = setting(30000, low=0, high=65535)
    uds: str | None = setting(None)
    ssl_certfile: str | None = setting(None)
    ssl_keyfile: str | None = setting(None)
    disable_ui: bool = setting(False)
    allowed_origins: str | None = setting(None)
    allowed_hosts: str | None = setting(None)
    body_timeout_s: float = setting(60.0, low=1.0)
    max_bodies_mb: int | None = setting(None, low=2)
    forwarded_allow_ips: str = setting("127.0.0.1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(EdgeSettings):
    """The HTTP server of `bough serve`."""

    root_path: str = setting("")
    api_key: str | None = setting(None)
    admin_api_key: str | None = setting(None)
    max_body_mb: int = setting(64, low=1)
    strict_fields: bool = setting(False)
    tokenizer_worker_num: int = setting(1, low=1, high=64)
    log_requests: bool = setting(False)
    log_requests_level: int = setting(2, choices=(0, 1, 2, 3))
    otlp_endpoint: str | None = setting(None)
    enable_metrics: bool = setting(False)
    metrics_names: str = setting("bough", choices=("bough", "sglang", "vllm"))
    enable_cache_report: bool = setting(False)
    skip_server_warmup: bool = setting(False)
    crash_dump_folder: str | None = setting(None)
    watchdog_timeout: float = setting(300.0, low=0.0)
    drain_timeout_s: float = setting(60.0, low=0)
