"""Several processes as one: what is divided, and what is added up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from bough.core.errors import SettingsError
from bough.core.gateway_settings import GatewaySettings
from bough.gateway.clients import Clients
from bough.gateway.policy_table import PolicyChoice
from bough.gateway.processes import STATE, ProcessGroup, SharedManagement, divided, merged
from bough.gateway.responses import Response
from bough.server.errors import HttpError
from tests.fakes.gateways import desk


def answer(content: Any) -> Response:
    return Response(200, [], json.dumps(content).encode())


def worker(load: int, state: str = "healthy", **more: Any) -> dict[str, Any]:
    return {"id": "a", "load": load, "state": state, "is_healthy": True, **more}


def test_limits_and_rates_are_divided() -> None:
    whole = GatewaySettings(processes=3, max_concurrent_requests=10, queue_size=100, rate_limit_rps=6.0)
    shares = [divided(whole, number) for number in range(3)]
    share = shares[0]
    assert (share.max_concurrent_requests, share.queue_size) == (4, 34)
    clients = Clients(share)
    for _ in range(2):
        clients.count(None, 0.0)
    with pytest.raises(HttpError, match="Too many requests"):  # a third of six in a second
        clients.count(None, 0.0)
    assert sum(each.max_concurrent_requests for each in shares) == 10
    assert sum(each.queue_size for each in shares) == 100
    assert share.max_concurrent_per_worker == -1
    assert divided(GatewaySettings(queue_size=7)).queue_size == 7
    with pytest.raises(SettingsError, match=r"--max-concurrent-per-worker .* at least 3"):
        divided(GatewaySettings(processes=3, max_concurrent_per_worker=2))


def test_several_processes_route_without_shared_memory() -> None:
    assert GatewaySettings().default_policy == GatewaySettings(processes=2).default_policy == "cost"
    assert GatewaySettings().options_of("cost") == {}
    assert GatewaySettings(processes=2).options_of("cost") == {"home_share": 0.5}
    assert GatewaySettings(processes=2, policy="random").options_of("random") == {}
    assert GatewaySettings(processes=2, policy="random").default_policy == "random"


def test_loads_are_added_and_the_first_tells_the_rest() -> None:
    pages = [
        answer({"workers": [worker(1, pid=7)], "total": 1}),
        answer({"workers": [worker(2, pid=None)], "total": 1}),
        answer({"workers": [], "total": 0}),
    ]
    assert json.loads(merged("/workers", pages).body) == {"workers": [worker(3, pid=7)], "total": 1}
    new = merged("/workers/a", [answer(worker(1)), answer(worker(1, is_healthy=False))])
    assert not json.loads(new.body)["is_healthy"]
    one = merged("/workers/a", [answer(worker(0, "draining")), answer(worker(2, "draining"))])
    assert json.loads(one.body) == worker(2, "draining")


def test_pages_of_metrics_are_added() -> None:
    page = '# HELP x_total Things\n# TYPE x_total counter\nx_total{a="1"} 2.0\n'
    state = '# HELP g_breaker_state State\n# TYPE g_breaker_state gauge\ng_breaker_state{w="u"} '
    both = merged(
        "/metrics",
        [Response(200, [], f"{page}{state}1.0\n".encode()), Response(200, [], f"{page}{state}0.0\n".encode())],
    )
    text = both.body.decode()
    assert 'x_total{a="1"} 4.0' in text and 'g_breaker_state{w="u"} 1.0' in text
    assert "# TYPE x_total counter" in text


def test_a_process_that_begins_takes_over_what_was_changed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with desk() as first, desk() as second:
            for d in (first, second):
                d.gateway.registry.add("http://127.0.0.1:9", source="flag")
                d.gateway.registry.add("http://127.0.0.1:10", source="flag")
            removed = next(w for w in first.gateway.registry if w.url.endswith(":9"))
            first.gateway.registry.remove(removed)
            first.gateway.policies.set_default(PolicyChoice("cache_aware", {"cache_threshold": 0.5}))
            route = SharedManagement(first.gateway, ProcessGroup(tmp_path, 0, 2), private=True).find("GET", STATE)
            assert route is not None
            group = ProcessGroup(tmp_path, 1, 2)

            async def ask(*given: Any) -> Response:
                return await route.handler("", b"")

            monkeypatch.setattr(group, "ask", ask)
            await SharedManagement(second.gateway, group).catch_up()
            assert [w.url for w in second.gateway.registry] == ["http://127.0.0.1:10"]
            assert second.gateway.policies.default == first.gateway.policies.default

    asyncio.run(main())
