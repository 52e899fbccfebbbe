"""The routes of the page at /ui: its files, the stream of the live tree, and timelines.

The tree is asked for once a second for all that watch through this process, and never while nobody does. Its text is
the operator's alone (`admin_only`): prompts of other clients stand in it. Tree and timelines know requests by their
handles: the id that a client gave its request may open more to others than what it reads and its times.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from bough.core.errors import RequestError
from bough.messages.requests import GetTimeline, GetTree
from bough.server.context import STATE_TIMEOUT_S, ServerContext
from bough.server.endpoint import EVENTS, GET, Endpoint, Query, json_response
from bough.server.errors import HttpError, native_shape
from bough.server.page import INDEX, page_file, zipped
from bough.server.streaming import EventStream, json_event

PERIOD_S = 1.0
SNAPSHOTS = 10  # of one stream; the page then opens the next, so that none keeps a server that drains
MAX_NODES = 1500  # the scheduler takes about 5 ms for so many on a slow core: 0.5 % of its time
NODE = Query("node", str, "its `created` and its first position, joined by a dash")
TIMELINE = (
    Query("since", float, "the `now` of the answer before: what ended earlier is left out"),
    Query("rid", str, "the id of a request; `found` is the one that has it"),
)


class TreeFeed:
    """The latest snapshot, shared by all streams of this process."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._lock = asyncio.Lock()
        self._event = b""
        self._made_s = float("-inf")

    async def event(self) -> bytes:
        async with self._lock:
            if time.monotonic() - self._made_s >= PERIOD_S:
                replicas = await self._context.client.ask(lambda call: GetTree(call, MAX_NODES), STATE_TIMEOUT_S)
                self._event, self._made_s = json_event({"replicas": replicas}), time.monotonic()
            return self._event

    async def events(self) -> AsyncGenerator[bytes, None]:
        sent = b""
        for _ in range(SNAPSHOTS):
            event = await self.event()
            yield b": as before\n\n" if event == sent else event
            sent = event
            await asyncio.sleep(PERIOD_S)


def page_routes(context: ServerContext) -> list[Endpoint]:
    if context.settings.server.disable_ui:
        return []
    feed = TreeFeed(context)

    async def show(request: Request) -> Response:
        name = request.path_params.get("name", INDEX)
        if not name:
            return RedirectResponse("../ui")  # the page names its files from there
        file = page_file(name)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(zipped(file.body), headers={**file.headers, "content-encoding": "gzip"})
        return Response(file.body, headers=file.headers)

    async def tree(request: Request) -> Response:
        return EventStream(feed.events(), lambda failure: json_event(native_shape(failure)))

    async def text(request: Request) -> Response:
        node = request.query_params.get("node", "")
        created, dash, start = node.partition("-")
        if not (dash and created.isdecimal() and start.isdecimal()) or len(node) > 40:
            raise RequestError(f"node must be two numbers joined by a dash, got {node[:40]!r}.", field="node")
        name = int(created), int(start)
        replicas = await context.client.ask(lambda call: GetTree(call, MAX_NODES, name), STATE_TIMEOUT_S)
        ids = next((replica["ids"] for replica in replicas if replica["ids"] is not None), None)
        if ids is None:
            raise HttpError(404, "The node is not in the tree any more.", "NotFoundError")
        return json_response({"text": context.require_tokenizer().decode(ids, skip_special_tokens=False)})

    async def timeline(request: Request) -> Response:
        given = request.query_params
        try:
            since = float(given.get("since", "0"))
        except ValueError:
            raise RequestError(f"since must be a number, got {given['since'][:40]!r}.", field="since") from None
        rid = given.get("rid", "")
        replicas = await context.client.ask(lambda call: GetTimeline(call, since, rid), STATE_TIMEOUT_S)
        return json_response({"replicas": list(map(context.recent.complete, replicas))})

    page: dict[str, Any] = {"methods": GET, "access": "open", "tag": "pages", "media_type": "text/html"}
    live: dict[str, Any] = {"methods": GET, "answer": dict[str, Any], "tag": "pages"}
    return [
        Endpoint("/ui", show, "The page: chat, load, timelines and the live tree", **page),
        Endpoint("/ui/{name:path}", show, "A file of the page", **page),
        Endpoint("/ui/tree", tree, "The prefix cache, once a second for ten seconds", media_type=EVENTS, **live),
        Endpoint("/ui/timeline", timeline, "The last steps and requests, and their times", queries=TIMELINE, **live),
        Endpoint("/ui/tree/text", text, "How a node's text begins", access="admin_only", queries=(NODE,), **live),
    ]
