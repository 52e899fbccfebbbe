"""How busy the engine is, for those who spread requests over several servers.

The figures are those of `/metrics`: what they mean and how they follow from the scheduler's state stands there once.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from bough.core.errors import RequestError
from bough.observability.metrics import State, state_figures
from bough.observability.metrics_page import CONTENT_TYPE, state_page
from bough.server.context import STATE_TIMEOUT_S, ServerContext
from bough.server.endpoint import Endpoint, Query
from bough.server.errors import HttpError
from bough.server.native.schemas import BriefLoad, Load, Loads
from bough.server.responses import json_response
from bough.version import __version__


def load_routes(context: ServerContext) -> list[Endpoint]:
    return [
        Endpoint(
            path="/v1/loads",
            methods=("GET",),
            handler=partial(loads, context),
            summary="How busy the engine is",
            answer=Loads,
            other_types=("text/plain",),
            queries=(
                Query("include", str, "accepted for SGLang's clients; everything is always included"),
                Query("format", Literal["json", "prometheus"], "prometheus: the figures as Prometheus' text instead"),
            ),
        ),
        Endpoint(
            path="/get_load",
            methods=("GET",),
            handler=partial(brief_load, context),
            summary="How busy the engine is, in the older form",
            answer=list[BriefLoad],
        ),
    ]


async def known_state(context: ServerContext) -> State:
    state = await context.state()
    if state is None:
        raise HttpError(503, f"The engine did not answer within {STATE_TIMEOUT_S:g} s.", "EngineStuckError")
    return state


async def loads(context: ServerContext, request: Request) -> Response:
    form = request.query_params.get("format", "json")
    if form not in ("json", "prometheus"):
        raise RequestError(f"format must be json or prometheus, got {form!r}.", field="format")
    state = await known_state(context)
    if form == "prometheus":
        return Response(state_page(state, context.model.name), headers={"content-type": CONTENT_TYPE})
    figures = state_figures(state)
    load = Load(
        dp_rank=0,
        num_running_reqs=state["num_running_reqs"],
        num_waiting_reqs=state["num_waiting_reqs"],
        num_used_tokens=state["num_used_tokens"],
        max_total_num_tokens=state["max_total_num_tokens"],
        token_usage=figures["token_usage"],
        gen_throughput=figures["gen_throughput"],
        cache_hit_rate=figures["cache_hit_rate"],
    )
    return json_response(Loads(time.time(), __version__, 1, [load]))


async def brief_load(context: ServerContext, request: Request) -> Response:
    state = await known_state(context)
    requests = state["num_running_reqs"] + state["num_waiting_reqs"]
    return json_response([BriefLoad(0, requests, state["num_waiting_reqs"], state["num_used_tokens"])])
