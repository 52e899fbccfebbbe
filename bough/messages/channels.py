"""Channels between the processes of one engine: ZeroMQ push/pull over files in a private folder; between hosts over
TCP, which only holders of the cluster's key get through.

Queues are unbounded: each party bounds what it sends by the requests it has taken, and a sender must never block. A
frame that cannot be decoded is a defect; where it concerns one request, the receiver puts something in its place.
"""

from __future__ import annotations

import hashlib
import os
import socket as sockets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from zmq.utils import z85

from bough.core.errors import SettingsError
from bough.messages.outputs import Reply

M = TypeVar("M")
TCP = "tcp://"
KEY_VARIABLE, KEY_LENGTH = "BOUGH_CLUSTER_KEY", 32
TOGETHER = 256  # messages of one call that arrive at once: steps are planned with all that is there
CLIENT_SHIFT = 48  # bits for counting: enough for a million requests a second over nine years


@dataclass(frozen=True, slots=True)
class Addresses:
    scheduler: str
    detokenizer: str
    clients: tuple[str, ...]  # by the client's number
    ranks: tuple[str, ...] = ()  # of the executors beside the scheduler's own; on other hosts tcp://
    results: str = ""  # of steps, from the last stage of a pipeline
    store: str = ""  # where all ranks meet when they are on several hosts
    home: str = ""  # the folder where all clients and replicas of this host meet
    schedulers: tuple[str, ...] = ()  # of all attention groups, where these are on several hosts

    @classmethod
    def in_folder(cls, folder: Path, clients: int = 1, ranks: int = 1, own: Path | None = None) -> Addresses:
        """The folder must be private to the user: a user who can open these files can talk to the engine. A replica
        among several has one of its `own` in it; they have the same clients."""
        own = own or folder
        scheduler, detokenizer, results = (f"ipc://{own}/{name}" for name in ("scheduler", "detokenizer", "results"))
        ways = tuple(f"ipc://{folder}/client{number}" for number in range(clients))
        others = tuple(f"ipc://{own}/rank{rank}" for rank in range(1, ranks))
        return cls(scheduler, detokenizer, ways, others, results, home=str(folder))

    @property
    def folder(self) -> Path:
        """Where the ranks meet."""
        return Path(self.scheduler.removeprefix("ipc://")).parent


def split_address(address: str) -> tuple[str, int]:
    """HOST and PORT of `HOST:PORT` or `[HOST]:PORT`, behind tcp:// or not."""
    host, _, port = address.removeprefix(TCP).rpartition(":")
    return host.strip("[]"), int(port)


def own_address(address: str) -> str:
    """The one from which this host reaches another; no packet is sent."""
    family, kind, protocol, _, target = sockets.getaddrinfo(*split_address(address), type=sockets.SOCK_DGRAM)[0]
    with sockets.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0]).removeprefix("::ffff:")  # as ZeroMQ writes addresses of IPv4


def listen_at(host: str) -> tuple[str, sockets.socket]:
    """A free port of this host: its address, and what listens there."""
    listener = sockets.create_server((host, 0), family=sockets.AF_INET6 if ":" in host else sockets.AF_INET)
    return tcp_url(host, listener.getsockname()[1]), listener


def tcp_url(host: str, port: int) -> str:
    return TCP + (f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


def cluster_key() -> str:
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) < KEY_LENGTH:
        raise SettingsError(
            f"Hosts of one engine, engines of a pair or of a store need one secret of {KEY_LENGTH} characters or more "
            f"in {KEY_VARIABLE}; make one with `python -c 'import secrets; print(secrets.token_hex(32))'`."
        )
    return key


def use_key(socket: zmq.Socket[Any], key: str, *, listens: bool) -> None:
    """Both ends derive the same pair from the key. A peer without it knows not even the public half, without which
    nobody can greet a listening socket; so that socket needs no list of who may come."""
    secret = z85.encode(hashlib.blake2b(key.encode(), digest_size=32, person=b"bough-cluster").digest())
    socket.ipv6, socket.curve_server, socket.curve_secretkey = True, listens, secret
    if not listens:
        socket.curve_publickey = socket.curve_serverkey = zmq.curve_public(secret)


def _open_tcp(socket: zmq.Socket[Any], address: str, listeners: Mapping[str, int], key: str) -> bool:
    """Of an address between hosts, the end that was given a descriptor for it listens; the other connects."""
    if not address.startswith(TCP):
        return False
    use_key(socket, key, listens=address in listeners)
    if address in listeners:
        socket.setsockopt(zmq.USE_FD, listeners[address])
        socket.bind(address)
    else:
        socket.connect(address)
    return True


class Sender:
    """The sending end of a channel, or of several that get the same; `pack` encodes what msgspec does not know."""

    def __init__(
        self,
        context: zmq.Context[Any],
        *addresses: str,
        pack: Callable[[Any], Any] | None = None,
        listeners: Mapping[str, int] | None = None,
        key: str = "",
    ) -> None:
        self._sockets = [context.socket(zmq.PUSH) for _ in addresses]
        for socket, address in zip(self._sockets, addresses, strict=True):
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.LINGER, 500)  # ms: queued messages are sent, and a dead peer delays nobody
            if not _open_tcp(socket, address, listeners or {}, key):
                socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=pack)

    def send(self, *messages: Any) -> None:
        """Sends all of them or, where one cannot be encoded, none."""
        frames = [self._encoder.encode(message) for message in messages]
        for first in range(0, len(frames), TOGETHER):
            for socket in self._sockets:
                socket.send_multipart(frames[first : first + TOGETHER], copy=False)

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()


class ClientSenders(list[Sender]):
    """The ways to an engine's clients. The number of a client stands in the upper bits of the handles and calls that it
    gives out, so an answer finds its way by the number it answers to."""

    def __init__(self, context: zmq.Context[Any], addresses: Addresses, key: str = "") -> None:
        super().__init__(Sender(context, address, key=key) for address in addresses.clients)

    def reply(self, message: Reply) -> None:
        self[client_of(message.call)].send(message)


def first_handle(client: int) -> int:
    return (client << CLIENT_SHIFT) + 1


def client_of(handle: int) -> int:
    return handle >> CLIENT_SHIFT


class Receiver(Generic[M]):
    """The receiving end of a channel; `union` is the type of everything that may arrive. `garbled` makes, of a handle
    (None: unknown) and what is wrong, the message that stands for an undecodable frame; without it such a frame raises.
    `unpack` is the inverse of the sender's `pack`."""

    def __init__(
        self,
        context: zmq.Context[Any],
        address: str,
        union: Any,
        garbled: Callable[[int | None, str], M] | None = None,
        unpack: Callable[[Any, Any], Any] | None = None,
        listeners: Mapping[str, int] | None = None,
        key: str = "",
    ) -> None:
        self._socket = self.socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        try:
            if not _open_tcp(self._socket, address, listeners or {}, key):
                self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close()  # its context could never end otherwise
            raise
        self._decoder = msgspec.msgpack.Decoder(union, dec_hook=unpack)
        self._garbled = garbled

    @property
    def fd(self) -> int:
        """Becomes readable when something arrives, once until everything is received."""
        return int(self._socket.getsockopt(zmq.FD))

    def receive(self, timeout_s: float | None = 0.0) -> list[M]:
        """Everything that has arrived. Waits up to `timeout_s` (None: for ever) for a first message."""
        messages: list[M] = []
        if timeout_s is None:  # a plain wait is cheaper than a poll
            messages.append(self._decode(self._socket.recv()))
        elif timeout_s != 0.0 and not self._socket.poll(int(timeout_s * 1000)):
            return messages
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decode(frame))

    def close(self) -> None:
        self._socket.close(linger=0)

    def _decode(self, frame: bytes) -> M:
        try:
            message: M = self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if self._garbled is None:
                raise
            return self._garbled(_handle_in(frame), str(error))
        return message


def _handle_in(frame: bytes) -> int | None:
    """The handle of a message that is wrong in another place, or the number of its call: both are counted together."""
    try:
        fields = msgspec.msgpack.decode(frame, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    handle = fields.get("handle", fields.get("call")) if isinstance(fields, dict) else None
    return handle if isinstance(handle, int) and not isinstance(handle, bool) else None
