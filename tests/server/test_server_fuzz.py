"""Schemathesis over the OpenAPI page: whatever fits the schemas, or nearly does, is answered and never with a 500.

It also holds the page to its word: status codes, content types and bodies must be those that it promises. That a
request which fits its schema may still be refused is no failure: ranges that depend on each other, or on the model, are
not in a schema.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from bough.messages.requests import Generate
from bough.server import live_tree
from bough.server.app import App
from bough.server.protocols import all_endpoints
from tests.fakes.scripted_engine import IM_END
from tests.server.native_engine import NativeEngine, Play

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


def play(message: Generate) -> Play:
    return [*b"hi", IM_END][: message.sampling.max_new_tokens] or [IM_END]


CONTEXT = NativeEngine(play).context(max_body_mb=1)
schema = schemathesis.openapi.from_asgi("/openapi.json", App(all_endpoints(CONTEXT), CONTEXT.settings.server))
CHECKS = [
    getattr(schemathesis.checks, name)
    for name in (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
        "unsupported_method",
    )
]


@pytest.fixture(autouse=True)
def quick_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of the tree lasts ten of these."""
    monkeypatch.setattr(live_tree, "PERIOD_S", 0.001)


@schema.parametrize()
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_nothing_fits_the_page_and_breaks_the_server(case: Any) -> None:
    case.call_and_validate(checks=CHECKS, timeout=60)  # seconds: other tests may keep the machine busy


@pytest.mark.long
def test_ten_thousand_cases() -> None:
    routes = [result.ok() for result in schema.get_all_operations()]
    for route in routes:

        @given(case=route.as_strategy())
        @settings(max_examples=10_000 // len(routes) + 1, suppress_health_check=list(HealthCheck))
        def try_route(case: Any) -> None:
            case.call_and_validate(checks=CHECKS, timeout=60)

        try_route()
