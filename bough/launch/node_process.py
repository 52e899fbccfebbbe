"""A host of an engine that does not serve: its ranks under a supervisor, and a port that tells only how they are."""

import asyncio
import contextlib
import threading
from dataclasses import replace
from typing import Any

import zmq
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from bough.core.settings import Settings
from bough.launch.nodes import LINGER_MS, NodeLink
from bough.launch.socket_folders import open_socket_folder
from bough.launch.spec import MODEL_EXECUTOR, ChildSpec, of_groups, replica_specs
from bough.launch.supervisor import Supervisor
from bough.loader.locate import ModelFiles, find_files
from bough.messages.channels import Sender, listen_at, own_address
from bough.messages.requests import Shutdown
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
        supervisor = Supervisor()
        cleanup.callback(supervisor.close)
        if parallel.groups > 1:
            specs = _specs_of_groups(settings, files, key, executor, link, cleanup)
            supervisor.follows = True
        else:
            first, flat = parallel.node_rank * parallel.ranks_per_node, settings.to_flat()
            spec = ChildSpec("executor", flat, link.join(files), files, executor=executor, cluster_key=key)
            specs = [replace(spec, rank=first + rank) for rank in range(parallel.ranks_per_node)]
        supervisor.start(specs)
        link.follow(supervisor, lambda: None if front is None else front.open(_tell_health))
    if supervisor.error is not None:
        raise supervisor.error


def _specs_of_groups(
    settings: Settings, files: ModelFiles, key: str, executor: str, link: NodeLink, cleanup: contextlib.ExitStack
) -> list[ChildSpec]:
    """Joins the first host, and says what this host's attention groups are made of."""
    parallel = settings.parallel
    host, here = own_address(parallel.dist_init_addr or ""), parallel.groups // parallel.nnodes
    listeners = dict(listen_at(host) for _ in range(here))
    for listener in listeners.values():
        cleanup.callback(listener.close)
    numbers = range(parallel.node_rank * here, (parallel.node_rank + 1) * here)
    replicas = of_groups(open_socket_folder(cleanup), link.join(files, tuple(listeners)), numbers, parallel)
    cleanup.callback(_end_detokenizers, [replicas[number].detokenizer for number in numbers])
    specs: list[ChildSpec] = []
    for number in numbers:
        scheduler, *others = replica_specs(settings, replicas, number, files, executor, key)
        way = scheduler.addresses.scheduler
        specs += [replace(scheduler, listeners={way: listeners[way].fileno()}), *others]
    return specs


def _end_detokenizers(addresses: list[str]) -> None:
    context: zmq.Context[Any] = zmq.Context()
    Sender(context, *addresses).send(Shutdown())
    context.destroy(linger=LINGER_MS)


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
