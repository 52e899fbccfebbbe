"""The first host of an engine on several: where the others join, and learn of the engine's end (`nodes`).

Ray may choose the hosts: a placement group with a bundle for each, the first where this process is, and in each other
one an actor that is the node. Everything goes when the engine does.
"""

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import zmq

from bough.core.errors import BoughError, EngineDeadError, ResourceError, SettingsError
from bough.core.settings import Settings
from bough.launch import nodes
from bough.launch.nodes import Ended, Join, Message, Placed, Ready
from bough.launch.spec import ChildSpec, of_groups
from bough.launch.supervisor import Supervisor
from bough.loader.locate import ModelFiles
from bough.messages.channels import KEY_LENGTH, TCP, Addresses, cluster_key, listen_at, split_address, tcp_url, use_key

log = logging.getLogger(__name__)

CONNECT_S = 5.0  # until a host of Ray that does not answer counts as absent
T = TypeVar("T")


class Head:
    """The first host's end. A thread of its own has the socket."""

    def __init__(self, settings: Settings, files: ModelFiles, cleanup: contextlib.ExitStack) -> None:
        self._settings, self._facts = settings, nodes.facts_of(settings, files)
        self._ray = RayNodes(settings, cleanup) if settings.parallel.on_ray else None
        where = settings.parallel.dist_init_addr if self._ray is None else self._ray.address
        self.key = cluster_key() if self._ray is None else secrets.token_hex(KEY_LENGTH)
        host, port = split_address(where or "")
        self._listeners: dict[str, socket.socket] = {}
        self._thread = threading.Thread(target=self._run, daemon=True, name="bough-nodes")
        self._ending: Ended | None = None
        self._nodes: dict[bytes, int] = {}  # who has joined, by ZeroMQ's name of the connection
        self._schedulers: dict[int, tuple[str, ...]] = {}  # of the attention groups of each
        self._announced: dict[int, list[dict[str, Any]]] = {}  # by these, when they were ready
        self._placed: Placed | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        cleanup.callback(self._close)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        use_key(self._socket, self.key, listens=True)
        nodes.watch_silence(self._socket)
        try:
            self._host = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
            self._socket.bind(tcp_url(self._host, port))
        except (OSError, zmq.ZMQError) as error:
            wrong = f"--dist-init-addr {settings.parallel.dist_init_addr}: cannot listen there ({error})."
            raise SettingsError(f"{wrong} Give a free port at an address of the first host.") from None

    def place(self, addresses: Addresses) -> Addresses:
        """With those of ranks on other hosts, who come to this one, and of the store where all meet."""
        near = addresses.ranks[: self._settings.parallel.ranks_per_node - 1]
        far = tuple(self._listen() for _ in addresses.ranks[len(near) :])
        results = self._listen()  # the last stage of a pipeline is on another host
        self._placed = Placed(replace(addresses, ranks=near + far, results=results, store=self._listen()))
        return self._placed.addresses

    def place_groups(self, folder: Path, clients: int) -> list[Addresses]:
        """The attention groups of all hosts, when these have joined; so `watch` comes first."""
        here = range(self._settings.parallel.groups // self._settings.parallel.nnodes)
        placed = Addresses("", "", tuple(self._listen() for _ in range(clients)), store=self._listen())
        schedulers = [self._listen() for _ in here]
        for _, far in self._of_all(self._schedulers):
            schedulers += far
        self._placed = Placed(replace(placed, schedulers=tuple(schedulers)))
        return of_groups(folder, self._placed.addresses, here, self._settings.parallel)

    def announced(self) -> list[dict[str, Any]]:
        """What the schedulers of other hosts say, when these are ready."""
        return [each for _, far in self._of_all(self._announced) for each in far]

    def _of_all(self, said: dict[int, T]) -> list[tuple[int, T]]:
        """What each other host has said, in their order; waits until all have."""
        wanted, patience_s = self._settings.parallel.nnodes - 1, self._settings.process.start_timeout_s
        deadline = time.monotonic() + patience_s
        while len(said) < wanted:
            if time.monotonic() > deadline:
                late = f"{wanted - len(said)} of {wanted} other hosts did not come in time"
                self._supervisor.fail(EngineDeadError(f"{late} ({patience_s:g} s, --start-timeout-s)."))
            if self._supervisor.error is not None:
                raise self._supervisor.error
            time.sleep(nodes.BEAT_MS / 1000)
        return sorted(said.items())

    def equip(self, spec: ChildSpec) -> ChildSpec:
        """A first rank, with what the others connect to."""
        not_own = {*spec.addresses.clients, *spec.beside, spec.addresses.store if spec.dp_rank else ""}
        return replace(spec, listeners={each: fd for each, fd in self.listeners.items() if each not in not_own})

    @property
    def listeners(self) -> dict[str, int]:
        return {address: listener.fileno() for address, listener in self._listeners.items()}

    def _listen(self) -> str:
        address, self._listeners[address] = listen_at(self._host)
        return address

    def watch(self, supervisor: Supervisor) -> None:
        """From here on hosts can join. A host that ends fails the supervisor, and the supervisor's end is told."""
        self._supervisor = supervisor
        supervisor.at_end = self._end
        self._thread.start()
        if self._ray is not None:
            address = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)).removeprefix(TCP)
            self._ray.start(address, self.key, supervisor.fail)
        log.info("waiting for %d more hosts", self._settings.parallel.nnodes - 1)

    def _end(self, reason: str) -> None:
        self._ending = self._ending or Ended(reason, type(self._supervisor.error).__name__)

    def _run(self) -> None:
        while self._ending is None:
            if self._socket.poll(nodes.BEAT_MS):
                peer, *frames = self._socket.recv_multipart()
                self._take(peer, b"".join(frames))
                continue
            for peer, node in self._nodes.items():
                reached = self._placed is None or self._reaches(peer, self._placed)
                if not reached and not self._socket.poll(0):  # its reason comes first
                    self._supervisor.fail(EngineDeadError(f"Node {node} has gone: its connection has ended."))
        for peer in self._nodes:
            self._reaches(peer, self._ending)
        self._socket.close(linger=nodes.LINGER_MS)

    def _take(self, peer: bytes, frame: bytes) -> None:
        try:
            message = nodes.decode(frame)
        except nodes.UNREADABLE as error:
            message = Ended(f"it sent what only another version knows ({error}).")
        if isinstance(message, Ended):
            self._supervisor.fail(message.error(f"Node {self._nodes.get(peer, '?')}"))
        elif isinstance(message, Ready) and peer in self._nodes:
            self._announced[self._nodes[peer]] = message.announced
        elif isinstance(message, Join):
            wrong = self._why_not(message)
            self._nodes[peer] = message.node
            if wrong is not None:
                self._supervisor.fail(SettingsError(wrong))
            elif self._placed is None or self._reaches(peer, self._placed):
                self._schedulers[message.node] = message.schedulers
                log.info("node %d has joined", message.node)

    def _why_not(self, join: Join) -> str | None:
        if join.node in self._nodes.values():
            return f"Two hosts have --node-rank {join.node}: give each its own."
        for name, ours in self._facts.items():
            if (theirs := join.facts.get(name)) != ours:
                return f"Hosts must not differ in {name}: node {join.node} has {theirs}, the first {ours}."
        return None

    def _reaches(self, peer: bytes, message: Message) -> bool:
        try:
            self._socket.send_multipart([peer, nodes.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno == zmq.EAGAIN  # it is there, but does not read at the moment
        return True

    def _close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
        if self._thread.is_alive():
            self._end("")
            self._thread.join()
        self._context.destroy(linger=nodes.LINGER_MS)


class Node:
    """In a process of Ray's. Its ranks are children of that process and leave with it, however it goes."""

    def run(self, flat: dict[str, Any], key: str) -> None:
        from bough.launch.node_process import run_node

        run_node(Settings.from_flat(flat), key)


class RayNodes:
    def __init__(self, settings: Settings, cleanup: contextlib.ExitStack) -> None:
        try:
            import ray
            from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Place

            if not ray.is_initialized():
                ray.init(address=_find_cluster(), logging_level="warning")
                cleanup.callback(ray.shutdown)
        except ImportError:
            raise SettingsError("--use-ray needs Ray: pip install 'bough[ray]'.") from None
        except (OSError, ValueError) as error:
            raise SettingsError(f"--use-ray: {error} Start one with `ray start`, or name it in RAY_ADDRESS.") from None
        self._ray, self._settings, self._over = ray, settings, threading.Event()
        host = str(ray.util.get_node_ip_address())
        self.address = f"{host}:0"  # a free port
        device, here = settings.model.device, settings.parallel.ranks_per_node
        gpus = here if device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU")) else 0
        bundle = {"CPU": here} | ({"GPU": gpus} if gpus else {})
        bundles = [bundle | {f"node:{host}": 0.001}, *[bundle] * (settings.parallel.nnodes - 1)]
        group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        cleanup.callback(ray.util.remove_placement_group, group)
        if not group.wait(settings.process.start_timeout_s):
            raise ResourceError(f"--use-ray: the cluster has no room for {bundles}, each on a host of its own.")
        places = [Place(group, i) for i in range(len(bundles))]
        options = [{"num_cpus": here, "num_gpus": gpus, "scheduling_strategy": place} for place in places]
        self._actors = [ray.remote(Node).options(**each).remote() for each in options[1:]]
        for actor in self._actors:
            cleanup.callback(ray.kill, actor)
        cleanup.callback(self._over.set)
        if gpus:  # this process is outside of Ray and takes those of the first bundle
            visible = ray.remote(os.getenv).options(**options[0]).remote("CUDA_VISIBLE_DEVICES", "")
            os.environ["CUDA_VISIBLE_DEVICES"] = ray.get(visible)

    def start(self, address: str, key: str, fail: Callable[[BoughError], None]) -> None:
        """Has the actors join at the address; `fail` hears of one that Ray loses or cannot start."""
        flat = self._settings.to_flat()
        flat |= {"use_ray": False, "distributed_executor_backend": None, "dist_init_addr": address}
        runs = [actor.run.remote(flat | {"node_rank": i}, key) for i, actor in enumerate(self._actors, start=1)]

        def watch() -> None:
            ended: list[Any] = []
            while not self._over.is_set() and not ended:
                ended, _ = self._ray.wait(runs, timeout=1.0)
            if not self._over.is_set():
                try:
                    reason = self._ray.get(ended[0]) or "it left."
                except self._ray.exceptions.RayError as error:
                    reason = getattr(error, "cause", error)
                fail(EngineDeadError(f"Node {runs.index(ended[0]) + 1} has ended: {reason}"))

        threading.Thread(target=watch, daemon=True, name="bough-ray").start()


def _find_cluster() -> str:
    """The address that is stated, or the word for what `ray start` has left on this host. Somebody answers there: Ray
    itself would try for minutes, and in silence."""
    from ray._private.services import canonicalize_bootstrap_address

    stated = os.environ.get("RAY_ADDRESS") or "auto"
    found: str | None = None if "://" in stated else canonicalize_bootstrap_address(stated)
    if found is None:  # Ray's client, or a cluster that is begun here
        return stated
    log.info("joining the Ray cluster at %s", found)
    try:
        socket.create_connection(split_address(found), CONNECT_S).close()
    except OSError as error:
        left = " Ray's file on this host names it; `ray stop` removes that." if stated == "auto" else ""
        raise ConnectionError(f"no Ray cluster answers at {found} ({error}).{left}") from None
    return stated
