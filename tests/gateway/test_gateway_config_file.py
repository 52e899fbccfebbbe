"""The configuration file: what it may say, and what happens when it changes under a running gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bough.core.errors import SettingsError
from bough.core.settings import Settings
from bough.gateway.config_file import ConfigFile, read_file
from tests.fakes.gateways import desk, until
from tests.fakes.workers import FakeWorker, workers


def test_everything_a_file_may_say(tmp_path: Path) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(
        "port: 8080\nqueue-size: 5\nworkers:\n  - http://a:1/\n  - {url: 'b:2', api_key: k}\n"
        "policies:\n  red: random\n  blue: {name: cache_aware, cache_threshold: 0.5}\n"
        "api_keys:\n  - plain\n  - {key: slow, name: team, rate_limit_rps: 2, rate_limit_burst: 4}\n"
    )
    content = read_file(str(file))
    assert content.settings == {"port": 8080, "queue_size": 5}
    assert [worker.url for worker in content.workers] == ["http://a:1", "http://b:2"]
    assert content.policies["blue"].options == {"cache_threshold": 0.5}
    assert [(key.name, key.rate_limit_rps) for key in content.api_keys] == [("file key 1", None), ("team", 2.0)]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("prot: 1", "prot"),
        ("queue_size: many", "queue_size"),
        ("workers: [ftp://x]", "ftp"),
        ("workers: [{url: 'http://a', colour: red}]", "colour"),
        ("workers: 5", "int"),
        ("workers: localhost", "list"),
        ("workers: ['http://[::1']", "looks like"),
        ("workers: ['http://a..b:1']", "looks like"),
        ("api_keys: secret", "list"),
        ("api_keys: {key: a}", "list"),
        ("api_keys: [{key: a, rate_limit_rps: .nan}]", "rate_limit_rps"),
        ("api_keys: [{key: a, rate_limit_burst: -1}]", "rate_limit_burst"),
        ("policies: [random]", "mapping"),
        ("selector: app=x", "selector must be a list"),
        ("selector: [5]", "labels"),
        ("policies: {red: {name: cache_aware, eviction_interval_secs: soon}}", "eviction_interval_secs"),
        ("a: " + "[" * 3000, "deep"),
        ("policies: {red: guess}", "guess"),
        ("policies: {red: {name: random, size: 3}}", "size"),
        ("policy: guess", "guess"),
        ("api_keys: ['']", "empty"),
        ("api_keys: [{key: a, rate_limit_rps: 0}]", "rate_limit_rps"),
        ("- a list", "settings"),
        ("a: [", "YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=word) as error:
        read_file(str(file))
    assert str(file) in str(error.value)


def test_a_changed_file_holds_and_a_wrong_one_does_not(tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "gateway.yaml"
        async with workers(FakeWorker(), FakeWorker()) as (one, two), desk() as d:
            file.write_text(f"workers: ['{one.url}']\npolicies: {{tiny: random}}\n")
            config = ConfigFile(str(file), d.gateway)
            config.apply()
            watching = asyncio.create_task(config.watch())
            urls = lambda: [w.url for w in d.gateway.registry]  # noqa: E731
            assert urls() == [one.url] and d.gateway.policies.shown()["models"] == {"tiny": "random"}
            (d.gateway.registry.add("http://127.0.0.1:9", source="api"))
            file.write_text(f"workers: ['{two.url}']\npolicies: {{tiny: guess}}\n")
            await asyncio.sleep(0.7)
            assert one.url in urls() and two.url not in urls()
            file.write_text(f"workers: ['{two.url}']\npolicy: random\napi_keys: [{{key: k, rate_limit_rps: 0.01}}]\n")
            await until(lambda: two.url in urls())
            assert urls() == ["http://127.0.0.1:9", two.url]
            assert d.gateway.policies.shown() == {"default": "random", "models": {}}
            await until(lambda: d.gateway.registry.available(None))
            assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == 401
            statuses = [
                (await d.post("/v1/completions", {"prompt": "x"}, headers={"x-api-key": "k"}))[0] for _ in range(2)
            ]
            assert statuses == [200, 429]
            watching.cancel()

    asyncio.run(main())


def test_watching_survives_whatever_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        file = tmp_path / "gateway.yaml"
        async with desk() as d:
            file.write_text("workers: []\n")
            config = ConfigFile(str(file), d.gateway)
            config.apply()
            watching = asyncio.create_task(config.watch())
            with monkeypatch.context() as patched:
                patched.setattr("bough.gateway.config_file.read_file", lambda file: 1 / 0)
                seen = file.write_text("workers: []\n# changed\n") and file.read_bytes()
                await until(lambda: config._seen == seen)
            file.write_text("workers: ['http://127.0.0.1:9']\n")
            await until(lambda: len(d.gateway.registry) == 1)
            assert (await d.post("/workers", {"url": "http://[::1"}))[0] == 400
            watching.cancel()

    asyncio.run(main())


def test_flags_win_over_a_file_that_changes_and_rates_are_divided(tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "gateway.yaml"
        given = {"policy": "random", "given": ("policy",), "processes": 2}
        async with workers(FakeWorker()) as (fake,), desk(fake, **given) as d:
            file.write_text("policy: least_loaded\n")
            config = ConfigFile(str(file), d.gateway)
            config.apply()
            file.write_text(
                "policy: prefix_hash\nrate_limit_rps: 20\n"
                "api_keys: [{key: k, rate_limit_rps: 0.02, rate_limit_burst: 4}]\n"
            )
            config.apply()
            assert d.gateway.policies.shown()["default"] == "random"
            assert d.gateway.clients._common[0].rate == 10.0
            body, headers = {"prompt": "x"}, {"x-api-key": "k"}
            statuses = [(await d.post("/v1/completions", body, headers=headers))[0] for _ in range(3)]
            assert statuses == [200, 200, 429]

    asyncio.run(main())


def test_a_policy_that_is_taken_out_of_the_file_gives_way_to_the_default(tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "gateway.yaml"
        async with workers(FakeWorker()) as (fake,), desk(fake, policy="random") as d:  # as the file says at the start
            file.write_text("policy: random\n")
            config = ConfigFile(str(file), d.gateway)
            config.apply()
            file.write_text("queue_size: 100\n")
            config.apply()
            assert d.gateway.policies.shown()["default"] == "cost"

    asyncio.run(main())


def test_a_file_that_loses_its_keys_changes_nothing_while_engines_take_code(tmp_path: Path) -> None:
    async def main() -> None:
        file = tmp_path / "gateway.yaml"
        file.write_text("api_keys: [tenant]\n")
        takes_code = Settings.from_flat({"enable_custom_logit_processor": True})
        async with workers(FakeWorker()) as (fake,), desk(fake, engine=takes_code) as d:
            config = ConfigFile(str(file), d.gateway)
            config.apply()
            file.write_text("queue_size: 5\n")
            with pytest.raises(SettingsError, match="add --api-key"):
                config.apply()
            assert (await d.post("/v1/completions", {"prompt": "x"}))[0] == 401 and not fake.requests

    asyncio.run(main())
