"""Joins the protocols into one ASGI application."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.routing import Route

from bough.core.settings import Settings
from bough.server.endpoint import Endpoint


def build_app(endpoints: Sequence[Endpoint], settings: Settings) -> Starlette:
    """All endpoints, routed."""
    app = Starlette(routes=[Route(e.path, e, methods=list(e.methods)) for e in endpoints])
    app.state.settings = settings
    return app
