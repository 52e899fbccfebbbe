"""`/metrics`: what the server has done and how busy it is, for Prometheus. Needs no key, like `/health`.

The counts are those of all HTTP processes; the scheduler is asked for its state, which it answers between two steps.
"""

from __future__ import annotations

import asyncio
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from bough.observability.metrics import State
from bough.observability.metrics_page import CONTENT_TYPE, metrics_page
from bough.server.context import ServerContext
from bough.server.endpoint import Endpoint

STATE_TIMEOUT_S = 5.0  # half of the time that Prometheus gives a page: a stuck engine must not hide the counts


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
    state = await _state(context)
    page = metrics_page(context.client.meter.totals(), state, context.model.name)
    return Response(page, headers={"content-type": CONTENT_TYPE})


async def _state(context: ServerContext) -> State | None:
    """None when the scheduler does not answer; its metrics are then missing, which is what a monitor must see."""
    try:
        async with asyncio.timeout(STATE_TIMEOUT_S):
            return (await context.client.state()).data
    except TimeoutError:
        return None
