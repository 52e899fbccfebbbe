"""The first host of an engine on several: where the others join, and learn of the engine's end (`nodes`)."""

import contextlib
import logging
import secrets
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import zmq

from bough.core.errors import EngineDeadError, SettingsError
from bough.core.settings import Settings
from bough.launch import nodes
from bough.launch.nodes import Ended, Join, Message, Placed, Ready
from bough.launch.ray_nodes import RayNodes
from bough.launch.spec import ChildSpec, of_groups
from bough.launch.supervisor import Supervisor
from bough.loader.locate import ModelFiles
from bough.messages.channels import KEY_LENGTH, TCP, Addresses, cluster_key, listen_at, split_address, tcp_url, use_key

log = logging.getLogger(__name__)

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
