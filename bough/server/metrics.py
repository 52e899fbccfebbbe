"""`/metrics`: what the server has done and how busy it is, for Prometheus. Needs no key, like `/health`.

The counts are those of all HTTP processes; the scheduler is asked for its state, which it answers between two steps.
"""

from __future__ import annotations

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from bough.observability.metrics_page import CONTENT_TYPE, metrics_page
from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint


def metrics_routes(context: ServerContext) -> list[Endpoint]:
    return [
        Endpoint(
            path="/metrics",
            methods=("GET",),
            handler=partial(metrics, context),
            summary="Counters, gauges and histograms in Prometheus' text format",
            access="open",
            tag="pages",
            media_type="text/plain",
        )
    ]


async def metrics(context: ServerContext, request: Request) -> Response:
    state = await context.state()  # its metrics are missing when there is none, which is what a monitor must see
    page = metrics_page(context.client.meter.totals(), state, context.model.name)
    return Response(page, headers={"content-type": CONTENT_TYPE})
