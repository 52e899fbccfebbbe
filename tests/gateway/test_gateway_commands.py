"""`bough gateway` and its sub-commands: flags, `roll`, `top`."""

from __future__ import annotations

import asyncio
import io
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bough.cli.gateway import _parser, settings_from
from bough.cli.main import main
from bough.core.errors import BoughError, SettingsError
from bough.core.gateway_settings import GatewaySettings
from bough.gateway import service
from bough.gateway.commands import AdminClient, figures, picture, roll
from bough.gateway.launching import free_ports
from bough.gateway.management import Management
from bough.gateway.policies import build_policy
from bough.gateway.policies.cache_aware import CacheAwarePolicy
from bough.server.http import open_listener
from tests.fakes.gateways import desk
from tests.fakes.workers import FakeWorker, text_of, tokens_of, workers

FLAGS = {
    "--policy": ("policy", "random"),
    "--launch": ("launch", 3),
    "--processes": ("processes", 2),
    "--max-concurrent-requests": ("max_concurrent_requests", 10),
    "--max-concurrent-per-worker": ("max_concurrent_per_worker", 4),
    "--queue-size": ("queue_size", 7),
    "--queue-timeout-secs": ("queue_timeout_secs", 3.5),
    "--rate-limit-rps": ("rate_limit_rps", 5.0),
    "--rate-limit-burst": ("rate_limit_burst", 9.0),
    "--worker-api-key": ("worker_api_key", "w"),
    "--request-timeout-secs": ("request_timeout_secs", 12.0),
    "--attempt-timeout-secs": ("attempt_timeout_secs", 1.5),
    "--retry-max-retries": ("retry_max_retries", 2),
    "--cb-failure-threshold": ("cb_failure_threshold", 4),
    "--cb-success-threshold": ("cb_success_threshold", 1),
    "--cb-timeout-duration-secs": ("cb_timeout_duration_secs", 5.0),
    "--health-check-interval-secs": ("health_check_interval_secs", 2.0),
    "--health-check-timeout-secs": ("health_check_timeout_secs", 1.0),
    "--health-failure-threshold": ("health_failure_threshold", 2),
    "--health-success-threshold": ("health_success_threshold", 1),
}


def test_every_flag_of_the_contract() -> None:
    words = [word for flag, (_, value) in FLAGS.items() for word in (flag, str(value))]
    words += ["--worker-urls", "http://a:1", "http://b:2", "--api-key", "x", "--api-key", "y"]
    settings = settings_from(_parser().parse(words), ("--device", "cpu"), {})
    assert {name: getattr(settings, name) for name, _ in FLAGS.values()} == dict(FLAGS.values())
    assert settings.worker_urls == ("http://a:1", "http://b:2") and settings.api_keys == ("x", "y")
    assert settings.engine_flags == ("--device", "cpu")


def test_defaults_variables_and_files(tmp_path: Path) -> None:
    settings = settings_from(_parser().parse([]), (), {})
    assert (settings.default_policy, settings.retry_max_retries, settings.queue_size) == ("cost", 5, 100)
    assert (settings.cb_failure_threshold, settings.cb_success_threshold) == (10, 3)
    assert (settings.health_check_interval_secs, settings.request_timeout_secs) == (60.0, 1800.0)
    file = tmp_path / "g.yaml"
    file.write_text("queue_size: 1\nport: 5\npolicy: random\n")
    environ = {"BOUGH_GATEWAY_PORT": "6", "BOUGH_GATEWAY_POLICY": "round_robin", "BOUGH_GATEWAY_API_KEY": "k"}
    settings = settings_from(_parser().parse(["--config", str(file), "--policy", "least_loaded"]), (), environ)
    assert (settings.queue_size, settings.port, settings.policy) == (1, 6, "least_loaded")
    assert settings.api_keys == ("k",) and settings.config == str(file)
    assert set(settings.given) == {"port", "policy"}
    environ = {"CONFIG": str(file), "WORKER_URLS": "http://a:1, http://b:2", "SELECTOR": "app=x tier=y"}
    settings = settings_from(_parser().parse([]), (), {f"BOUGH_GATEWAY_{name}": text for name, text in environ.items()})
    assert settings.worker_urls == ("http://a:1", "http://b:2") and settings.selector == ("app=x", "tier=y")
    assert settings.config == str(file) and settings.port == 5
    file.write_text("selector: [app=z]\n")
    assert settings_from(_parser().parse(["--config", str(file)]), (), {}).selector == ("app=z",)


@pytest.mark.parametrize("words", [["--queue-size", "-1"], ["--port", "x"], ["--api-key", " "]])
def test_values_that_cannot_be_used(words: list[str]) -> None:
    with pytest.raises(SettingsError):
        settings_from(_parser().parse(words), (), {})


def test_flags_of_engines_that_nobody_starts_are_refused() -> None:
    flags = ("--device", "cpu", "--api-key", "secret-one", "--admin-api-key=secret-two")
    with pytest.raises(SettingsError, match=r"--device cpu.*add --launch") as refused:
        settings_from(_parser().parse([]), flags, {})
    assert "secret" not in str(refused.value)


CODE = "--enable-custom-logit-processor"


@pytest.mark.parametrize("where", ["flag", "other spelling", "file", "variable"])
def test_engines_of_its_own_take_code_only_from_clients_with_a_key(where: str, tmp_path: Path) -> None:
    """The key that the gateway draws for them is one that no client needs."""
    file = tmp_path / "engines.yaml"
    file.write_text("enable-custom-logit-processor: true\n")
    other = ("--enable_custom_logit_processor",)
    flags = {"flag": (CODE,), "other spelling": other, "file": ("--config", str(file)), "variable": ()}[where]
    environ = {"BOUGH_API_KEY": "the engines'"}
    if where == "variable":
        environ["BOUGH_ENABLE_CUSTOM_LOGIT_PROCESSOR"] = "1"
    launch = ["--launch", "1"]
    for words in (launch, [*launch, "--worker-api-key", "k"], [*launch, "--admin-api-key", "root"]):
        with pytest.raises(SettingsError, match="add --api-key"):
            settings_from(_parser().parse(words), flags, environ)
    with pytest.raises(SettingsError, match="add --api-key"):
        settings_from(_parser().parse([]), flags, environ | {"BOUGH_GATEWAY_LAUNCH": "1"})
    with_keys = tmp_path / "gateway.yaml"
    with_keys.write_text("api_keys: [tenant]\n")
    for words in (["--api-key", "tenant"], ["--config", str(with_keys)]):
        taken = settings_from(_parser().parse([*launch, *words]), flags, environ)
        assert taken.engine.scheduler.enable_custom_logit_processor
    settings_from(_parser().parse(launch), (), {})
    settings_from(_parser().parse([]), (), environ)  # of other workers it knows nothing


def test_a_flag_of_engines_is_told_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse(["--launch", "1", "--max-total-tokens", "4000"])
    assert "unknown flag --max-total-tokens" in (said := capsys.readouterr().err) and "go behind `--`" in said


def test_flags_of_sglangs_router_mean_the_same() -> None:
    words = "--max-payload-size 1048577 --shutdown-grace-period-secs 7 --tls-cert-path c.pem --tls-key-path k.pem"
    words += " --cors-allowed-origins http://a http://b --disable-retries --disable-circuit-breaker --enable-igw"
    words += " --backend sglang --history-backend memory --health-check-endpoint /alive --prometheus-host 0.0.0.0"
    settings = settings_from(_parser().parse(words.split()), (), {})
    assert (settings.max_body_mb, settings.drain_timeout_s, settings.retry_max_retries) == (2, 7.0, 0)
    assert (settings.ssl_certfile, settings.ssl_keyfile, settings.health_check_endpoint) == ("c.pem", "k.pem", "/alive")
    assert settings.allowed_origins == "http://a,http://b" and settings.cb_failure_threshold == 2**31 - 1
    pair = "--pd-disaggregation --prefill http://a:1 NONE --decode http://b:2"
    assert settings_from(_parser().parse(pair.split()), (), {}).prefill == (("http://a:1", 8998),)


@pytest.mark.parametrize(
    ("flag", "instead"),
    [
        ("--model-path", "behind `--` with --launch"),
        ("--otlp-traces-endpoint=x", "--otlp-endpoint"),
        ("--rate-limit-tokens-per-second", "--rate-limit-rps"),
        ("--control-plane-api-keys", "--admin-api-key"),
    ],
)
def test_flags_of_sglangs_router_that_are_not_here_say_what_to_do(
    flag: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["gateway", "--worker-urls", "http://a:1", flag, "4"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith(f"bough: {flag.partition('=')[0]} is not here: ") and instead in said and said.count("\n") == 1
    )


def test_options_of_the_default_policy_are_flags_too() -> None:
    words = "--policy cache_aware --cache-threshold 0.5 --balance-abs-threshold 32 --balance-rel-threshold 1.1"
    words += " --eviction-interval-secs 30 --max-tree-size 1000 --prefill-policy kv_events"
    settings = settings_from(_parser().parse(words.split()), (), {})
    for name in (settings.default_policy, "kv_events"):
        policy = build_policy(name, **settings.options_of(name))
        assert isinstance(policy, CacheAwarePolicy)
        assert (policy.cache_threshold, policy.balance_abs_threshold, policy.balance_rel_threshold) == (0.5, 32, 1.1)
        assert (policy.eviction_interval_secs, policy.max_tree_size) == (30.0, 1000)
    settings = settings_from(_parser().parse(["--port", "0", "--cache-threshold", "0.5"]), (), {})
    with (
        open_listener(settings) as listener,
        pytest.raises(SettingsError, match="cost has no option 'cache_threshold'"),
    ):
        asyncio.run(service.serve(settings, listener, lambda url: None))


def test_metrics_alone_can_have_a_port() -> None:
    async def main() -> None:
        (port,) = free_ports(1)
        async with workers(FakeWorker()) as (fake,), desk(fake, api_keys=("k",)) as d, AsyncExitStack() as cleanup:
            await service._open_metrics(Management(d.gateway), GatewaySettings(host="127.0.0.1"), port, cleanup)

            async def status(method: str, path: str, **headers: str) -> tuple[int, str]:
                async with d.client.request(method, f"http://127.0.0.1:{port}{path}", headers=headers) as answer:
                    return answer.status, await answer.text()

            code, page = await status("GET", "/metrics")
            assert code == 200 and f'bough_gateway_worker_healthy{{worker="{fake.url}"}} 1.0' in page
            assert (await status("HEAD", "/metrics"))[0] == 200 and (await status("POST", "/metrics"))[0] == 405
            for method, path in (("GET", "/workers"), ("POST", "/v1/completions"), ("PUT", "/policies"), ("GET", "/")):
                assert (await status(method, path))[0] == 404
            assert (await status("GET", "/metrics", Host="evil.example"))[0] == 403

    asyncio.run(main())


def test_rolling_to_other_workers_fails_no_request() -> None:
    async def main() -> None:
        fakes = [FakeWorker(pause_s=0.005) for _ in range(4)]
        async with workers(*fakes), desk(*fakes[:2]) as d:
            running = True

            async def load() -> None:
                while running:
                    raw = await d.stream({"prompt": "x", "max_tokens": 10})
                    assert raw.count(b"data: {") == 10 and raw.endswith(b"[DONE]\n\n")

            loads = [asyncio.create_task(load()) for _ in range(4)]
            pairs = [(fakes[n].url, fakes[n + 2].url) for n in range(2)]
            said: list[str] = []
            await asyncio.to_thread(roll, AdminClient(d.url), pairs, 20.0, said.append)
            running = False
            await asyncio.gather(*loads)
            assert sorted(w.url for w in d.gateway.registry) == sorted(fake.url for fake in fakes[2:])
            assert fakes[0].aborted == fakes[1].aborted == 0 and len(said) == 6
            with pytest.raises(BoughError, match="--replace"):
                await asyncio.to_thread(roll, AdminClient(d.url), [], 1.0, said.append)
            with pytest.raises(BoughError, match="no worker at http://no:1;"):
                await asyncio.to_thread(roll, AdminClient(d.url), [("http://no:1", "http://no:2")], 1.0, said.append)

    asyncio.run(main())


def test_the_table_shows_workers_and_figures() -> None:
    async def main() -> None:
        async with workers(FakeWorker("red")) as (fake,), desk(fake) as d:
            status, answer = await d.post("/v1/completions", {"prompt": "x"})
            assert status == 200 and answer["choices"][0]["text"] == text_of(tokens_of("x", 4))
            client = AdminClient(d.url)
            listed, page = await asyncio.to_thread(lambda: (client.workers(), client.call("GET", "/metrics").text))
            out = io.StringIO()
            Console(file=out, width=160).print(picture(listed, figures(page), 160))
            text = out.getvalue()
            assert "red" in text and "healthy" in text and fake.url in text
            assert "requests 1 " in text and "cached 50%" in text

    asyncio.run(main())


def test_a_narrow_terminal_shows_fewer_columns_and_no_halves() -> None:
    row: dict[str, Any] = {
        "id": "7b25d2f0a1c3",
        "url": "http://127.0.0.1:30001",
        "model_id": "Qwen3-0.6B",
        "state": "unhealthy",
        "breaker": "half_open",
        "load": 12,
        "limit": None,
        "capacity": 128,
        "reported_load": 14.0,
        "restarts": 3,
        "last_error": "its health check failed: it could not be reached in time",
    }
    seen: dict[int, str] = {}
    for width in (40, 80, 200):
        out = io.StringIO()
        Console(file=out, width=width).print(picture([row], {}, width))
        seen[width] = out.getvalue()
        assert "\u2026" not in seen[width] and row["url"] in seen[width] and "unhealthy" in seen[width]
    assert row["id"] in seen[80] and "12/128" in seen[80] and "half_open" in seen[80]
    assert row["id"] not in seen[40]
    assert all(part in seen[200] for part in ("Qwen3-0.6B", "restarts", "14", "its health check failed"))


def test_a_gateway_that_nothing_can_feed_ends_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async def follow(*_: object) -> None:
        raise SettingsError("there is no cluster")

    monkeypatch.setattr(service.KubernetesPods, "follow", follow)
    settings = GatewaySettings(port=0, service_discovery=True, selector=("app=x",))
    with open_listener(settings) as listener, pytest.raises(SettingsError, match="no cluster"):
        asyncio.run(service.serve(settings, listener, lambda url: None))


def test_a_gateway_that_is_not_there() -> None:
    with pytest.raises(BoughError, match="--url"):
        AdminClient("http://127.0.0.1:9").workers()
