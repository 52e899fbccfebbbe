"""A host of an engine that does not serve: its ranks under a supervisor, and a port that tells only how they are."""

import asyncio
import contextlib
import threading
from dataclasses import replace

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from bough.core.settings import Settings
from bough.launch.nodes import NodeLink
from bough.launch.spec import MODEL_EXECUTOR, ChildSpec
from bough.launch.supervisor import Supervisor
from bough.loader.locate import find_files
from bough.observability.logs import set_up_logging
from bough.server.app import Front
from bough.server.http import HttpServer, open_listener


def run_node(settings: Settings, key: str, executor: str = MODEL_EXECUTOR, front: Front | None = None) -> None:
    """Until the engine ends. Raises why, unless it ended in order."""
    parallel = settings.parallel
    set_up_logging(f"node {parallel.node_rank}", settings.process.log_level)
    files = find_files(settings.model)
    with contextlib.ExitStack() as cleanup:
        link = NodeLink(settings, key)
        cleanup.callback(link.close)
        addresses = link.join(files)
        supervisor = Supervisor()
        cleanup.callback(supervisor.close)
        first, flat = parallel.node_rank * parallel.ranks_per_node, settings.to_flat()
        spec = ChildSpec("executor", flat, addresses, files, executor=executor, cluster_key=key)
        supervisor.start([replace(spec, rank=first + rank) for rank in range(parallel.ranks_per_node)])
        link.follow(supervisor, lambda: None if front is None else front.open(_tell_health))
    if supervisor.error is not None:
        raise supervisor.error


def serve_health(settings: Settings) -> Front:
    """On the port of the settings, in a thread that ends with the process."""
    listener = open_listener(settings.server)
    front = Front(root_path=settings.server.root_path)
    server = HttpServer(front, listener, settings.server)
    threading.Thread(target=lambda: asyncio.run(server.run_here()), daemon=True, name="bough-health").start()
    return front


async def _tell_health(scope: Scope, receive: Receive, send: Send) -> None:
    found = scope["path"] in ("/health", "/health_generate", "/ping")
    message = "The ranks of this host compute." if found else "This host only computes; ask the first (--node-rank 0)."
    await JSONResponse({"message": message}, 200 if found else 404)(scope, receive, send)
