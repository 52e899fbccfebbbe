"""The route of the page's timelines: what the schedulers recorded of steps and requests, joined with what this process
knows of its own requests: how long they were read and tokenised, and when their last text arrived.

A request is known by its handle: the id that its client gave it may open more to others than its times.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bough.client.outputs import RequestOutput
from bough.core.errors import RequestError
from bough.messages.requests import GetTimeline
from bough.observability.history import REQUESTS
from bough.observability.logs import request_began
from bough.server.context import STATE_TIMEOUT_S, ServerContext
from bough.server.endpoint import GET, Endpoint, Query, json_response
from bough.server.tracing import finish_word

QUERIES = (
    Query("since", float, "the `now` of the answer before: what ended earlier is left out"),
    Query("rid", str, "the id of a request; `found` is the one that has it"),
)
SAME_CLOCK_S = 1.0  # clocks that differ by more are those of two machines


class RecentRequests:
    """A watcher of the engine's client. Owns the times of its last requests, by handle."""

    def __init__(self) -> None:
        self._times: dict[int, tuple[float, float, float | None, str]] = {}

    def arrived(self, answer: RequestOutput) -> None:
        self._times[answer.handle] = (request_began.get() or answer.received_at, answer.received_at, None, "")
        if len(self._times) > 2 * REQUESTS:
            del self._times[next(iter(self._times))]

    def ended(self, answer: RequestOutput) -> None:
        began = self._times.get(answer.handle, (answer.received_at,))[0]
        self._times[answer.handle] = (began, answer.received_at, answer.finished_at, finish_word(answer))

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        """With what came before the scheduler and after it, where the request is this process's."""
        began, sent, finished, finish = self._times.get(request["id"], (request["arrived"], 0.0, None, ""))
        if sent:
            request["stages"] = [("tokenise", sent, 0), ("hand over", request["arrived"], 0), *request["stages"]]
        if finished is not None:
            request["stages"].append(("detokenise", finished, 0))
        return request | {"arrived": began, "finish": finish}


def timeline_route(context: ServerContext) -> Endpoint:
    async def timeline(request: Request) -> Response:
        given = request.query_params
        try:
            since = float(given.get("since", "0"))
        except ValueError:
            raise RequestError(f"since must be a number, got {given['since'][:40]!r}.", field="since") from None
        rid = given.get("rid", "")
        replicas = await context.client.ask(lambda call: GetTimeline(call, since, rid), STATE_TIMEOUT_S)
        for replica in replicas:
            if context.recent is not None and abs(time.perf_counter() - replica["now"]) < SAME_CLOCK_S:
                replica["requests"] = list(map(context.recent.complete, replica["requests"]))
        return json_response({"replicas": replicas})

    summary = "The last steps and requests, and where their time went"
    return Endpoint("/ui/timeline", timeline, summary, methods=GET, answer=dict[str, Any], tag="pages", queries=QUERIES)
