"""What the gateway gives the engines that it starts: sockets and keys that are for itself alone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bough.cli.serve import settings_of
from bough.core.gateway_settings import GatewaySettings
from bough.core.settings import Settings
from bough.gateway.launching import LocalEngines
from bough.memory.tree.events import parse_config
from tests.fakes.gateways import desk


def test_the_sockets_of_launched_engines_are_for_the_gateway_alone() -> None:
    async def main() -> None:
        async with desk() as d:
            engines = LocalEngines(GatewaySettings(launch=1, policy="kv_events"), d.gateway.registry, pytest.fail)
            words, environment = engines._command(0)
            key = environment["BOUGH_API_KEY"]
            assert len(key) > 30 and not any(key in word for word in words)  # other users see the words in `ps`
            assert words[words.index("--host") + 1] == "127.0.0.1"
            config = parse_config(words[words.index("--kv-events-config") + 1])
            for endpoint in (config.endpoint, config.replay_endpoint or ""):
                folder = Path(endpoint.removeprefix("ipc://")).parent
                assert folder.stat().st_mode & 0o777 == 0o700
            await engines.close()
            assert not folder.exists()

    asyncio.run(main())


def test_a_key_that_the_user_chose_is_the_engines() -> None:
    async def main() -> None:
        async with desk() as d:
            engines = LocalEngines(GatewaySettings(launch=1, worker_api_key="chosen"), d.gateway.registry, pytest.fail)
            environment = engines._command(0)[1]
            assert environment["BOUGH_API_KEY"] == environment["BOUGH_ADMIN_API_KEY"] == "chosen", "also for text"
            await engines.close()

    asyncio.run(main())


def test_further_processes_have_the_keys_of_launched_engines_from_the_start() -> None:
    async def main() -> None:
        async with desk(launched=(("http://127.0.0.1:9", "drawn"),)) as d:
            (worker,) = d.gateway.registry
            assert (worker.api_key, worker.source) == ("drawn", "launch")

    asyncio.run(main())


@pytest.mark.parametrize("taken", [False, True])
def test_a_file_of_engines_that_changes_does_not_change_whether_they_take_code(taken: bool, tmp_path: Path) -> None:
    file = tmp_path / "engines.yaml"
    file.write_text("enable-custom-logit-processor: true\n")
    flags = ("--config", str(file))

    async def main() -> None:
        async with desk() as d:
            chosen = Settings.from_flat({"enable_custom_logit_processor": taken})
            settings = GatewaySettings(launch=1, engine_flags=flags, engine=chosen)
            engines = LocalEngines(settings, d.gateway.registry, pytest.fail)
            words, environment = engines._command(0)
            read = settings_of(words[words.index("serve") + 1 :], environment)
            assert read.scheduler.enable_custom_logit_processor is taken
            await engines.close()

    asyncio.run(main())
