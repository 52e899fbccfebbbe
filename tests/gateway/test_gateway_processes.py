"""Several processes as one: what is divided, and what is added up."""

from __future__ import annotations

import json
from typing import Any

from bough.core.gateway_settings import GatewaySettings
from bough.gateway.answers import Answer
from bough.gateway.processes import divided, merged


def answer(content: Any) -> Answer:
    return Answer(200, [], json.dumps(content).encode())


def worker(load: int, state: str = "healthy", **more: Any) -> dict[str, Any]:
    return {"id": "a", "load": load, "state": state, **more}


def test_limits_and_rates_are_divided() -> None:
    whole = GatewaySettings(processes=3, max_concurrent_requests=10, queue_size=100, rate_limit_rps=6.0)
    share = divided(whole)
    assert (share.max_concurrent_requests, share.queue_size, share.rate_limit_rps) == (4, 34, 2.0)
    assert share.max_concurrent_per_worker == -1 and share.rate_limit_burst is None
    assert divided(GatewaySettings(queue_size=7)).queue_size == 7


def test_several_processes_route_without_shared_memory() -> None:
    assert GatewaySettings().default_policy == "cache_aware"
    assert GatewaySettings(processes=2).default_policy == "prefix_hash"
    assert GatewaySettings(processes=2, policy="random").default_policy == "random"


def test_loads_are_added_and_the_first_tells_the_rest() -> None:
    pages = [
        answer({"workers": [worker(1, pid=7)], "total": 1}),
        answer({"workers": [worker(2, pid=None)], "total": 1}),
        answer({"workers": [], "total": 0}),
    ]
    assert json.loads(merged("/workers", pages).body) == {"workers": [worker(3, pid=7)], "total": 1}
    one = merged("/workers/a", [answer(worker(0, "draining")), answer(worker(2, "draining"))])
    assert json.loads(one.body) == worker(2, "draining")


def test_pages_of_metrics_are_added() -> None:
    page = '# HELP x_total Things\n# TYPE x_total counter\nx_total{a="1"} 2.0\n'
    state = '# HELP g_breaker_state State\n# TYPE g_breaker_state gauge\ng_breaker_state{w="u"} '
    both = merged(
        "/metrics", [Answer(200, [], f"{page}{state}1.0\n".encode()), Answer(200, [], f"{page}{state}0.0\n".encode())]
    )
    text = both.body.decode()
    assert 'x_total{a="1"} 4.0' in text and 'g_breaker_state{w="u"} 1.0' in text
    assert "# TYPE x_total counter" in text
