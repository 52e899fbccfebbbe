"""The hosts of one engine. The first listens at `--dist-init-addr`; the others join there, are told where the ranks
meet, and stay connected: each side hears of the other's end, with its reason, and takes silence for an end.
Without the cluster's key nobody joins, hears anything or is heard."""

import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from bough.core import errors
from bough.core.errors import BoughError, EngineDeadError, SettingsError
from bough.core.parallel_settings import ParallelSettings
from bough.core.settings import Settings, all_fields
from bough.launch.supervisor import Supervisor
from bough.loader.locate import ModelFiles, fingerprint
from bough.messages.channels import KEY_VARIABLE, TCP, Addresses, cluster_key, use_key
from bough.version import __version__

log = logging.getLogger(__name__)

BEAT_MS = 250  # between two looks at who is there
SILENCE_MS = 5000  # after which a host counts as gone
LINGER_MS = 1000  # for the reason of the end
# What each host may have in its own way; the files of the model are compared themselves.
OWN_SETTINGS = frozenset(
    {"model_path", "tokenizer_path", "chat_template", "served_model_name", "cpu_threads", "cpu_instruction_set"}
    | {"kv_events_config", "node_rank", "dist_init_addr", "use_ray", "distributed_executor_backend"}
)
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Join(msgspec.Struct, frozen=True, tag=True):
    node: int
    facts: dict[str, Any]  # what must be the same on all hosts
    schedulers: tuple[str, ...] = ()  # of its attention groups


class Ready(msgspec.Struct, frozen=True, tag=True):
    announced: list[dict[str, Any]]  # by the schedulers of its attention groups


class Placed(msgspec.Struct, frozen=True, tag=True):
    addresses: Addresses  # sent again and again, which fails where a host has gone


class Ended(msgspec.Struct, frozen=True, tag=True):
    reason: str = ""  # empty: in order
    kind: str = ""  # of the error

    def error(self, who: str) -> BoughError:
        known: type[BoughError] = getattr(errors, self.kind, EngineDeadError)
        return known(f"{who} has ended: {self.reason}")


Message = Join | Ready | Placed | Ended
encode = msgspec.msgpack.encode
decode: Callable[[bytes], Message] = msgspec.msgpack.Decoder(Message).decode
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)  # what it raises for a frame of another version


def check_nodes(parallel: ParallelSettings) -> None:
    """Refuses what does not describe hosts."""
    nodes = parallel.nnodes
    if nodes == 1 and parallel.node_rank:
        raise SettingsError(f"--node-rank {parallel.node_rank}: with several hosts, say how many (--nnodes).")
    if parallel.node_rank >= nodes:
        raise SettingsError(f"--node-rank {parallel.node_rank}: with --nnodes {nodes} they are 0 to {nodes - 1}.")
    if nodes > 1 and parallel.dp_size > 1 and not parallel.enable_dp_attention:
        why = "replicas need nothing of each other"
        raise SettingsError(f"--dp-size is for one host, because {why}: run a server on each, behind `bough gateway`.")
    if parallel.groups > 1 and parallel.groups % nodes:
        text = f"--nnodes {nodes}: each of the {parallel.groups} groups of --enable-dp-attention is on one host"
        raise SettingsError(f"{text}; use a --dp-size that is a multiple of {nodes}.")
    if parallel.ranks % nodes:
        raise SettingsError(f"--nnodes {nodes}: --tp-size times --pp-size ({parallel.ranks}) cannot be spread evenly.")
    if parallel.on_ray and (nodes == 1 or parallel.node_rank or parallel.dist_init_addr):
        raise SettingsError("--use-ray needs --nnodes above 1, and neither --node-rank nor --dist-init-addr.")
    if nodes > 1 and not parallel.on_ray:
        host, _, port = (parallel.dist_init_addr or "").rpartition(":")
        if host in ("", "0.0.0.0", "[::]", "::") or not port.isdecimal() or not 0 < int(port) < 65536:
            text = f"--nnodes {nodes} needs --dist-init-addr HOST:PORT: an address at which others reach the first host"
            raise SettingsError(f"{text}, and a free port there; got {parallel.dist_init_addr!r}.")
        cluster_key()


def facts_of(settings: Settings, files: ModelFiles) -> dict[str, Any]:
    facts = {"Bough's version": __version__, "the files of the model": fingerprint(files)}
    shared = [f.name for group, f in all_fields() if group not in ("server", "process") and f.name not in OWN_SETTINGS]
    flat = settings.to_flat()
    return facts | {"--" + name.replace("_", "-"): flat[name] for name in shared}


class NodeLink:
    """Any other host's end, on one thread."""

    def __init__(self, settings: Settings, key: str) -> None:
        self._settings, self._where = settings, settings.parallel.dist_init_addr
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        use_key(self._socket, key, listens=False)
        watch_silence(self._socket)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | REFUSED)
        self._socket.connect(f"{TCP}{self._where}")  # again and again, until the first host listens

    def join(self, files: ModelFiles, schedulers: tuple[str, ...] = ()) -> Addresses:
        self._socket.send(encode(Join(self._settings.parallel.node_rank, facts_of(self._settings, files), schedulers)))
        deadline = time.monotonic() + self._settings.process.start_timeout_s
        log.info("joining the first host at %s", self._where)
        while time.monotonic() < deadline:
            match self._next():
                case Placed(addresses):
                    return addresses
                case Ended() as end:
                    raise end.error("The first host")
        raise EngineDeadError(f"The first host did not answer at {self._where} in time (--start-timeout-s).")

    def follow(self, supervisor: Supervisor, on_ready: Callable[[], None]) -> None:
        """Until one side ends; the other is told."""
        told_ready = False
        try:
            while supervisor.error is None:
                if not told_ready and all(child.ready is not None for child in supervisor.children):
                    of_schedulers = [child.ready for child in supervisor.children if child.role == "scheduler"]
                    self._socket.send(encode(Ready([each or {} for each in of_schedulers])))
                    on_ready()
                    told_ready = True
                end = self._next()
                if isinstance(end, Ended):
                    supervisor.fail(end.error("The first host")) if end.reason else supervisor.expect_endings()
                    return
            self._socket.send(encode(Ended(str(supervisor.error), type(supervisor.error).__name__)))
        except BaseException as error:
            told = isinstance(error, SystemExit | KeyboardInterrupt)
            self._socket.send(encode(Ended("It was told to stop." if told else repr(error))))
            raise

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)

    def _next(self) -> Message | None:
        """Waits a moment. What was said before a connection ended comes first."""
        ended = bool(self._monitor.poll(0))
        if self._socket.poll(0 if ended else BEAT_MS):
            return decode(self._socket.recv())
        if ended and recv_monitor_message(self._monitor)["event"] & REFUSED:
            raise SettingsError(f"The first host at {self._where} refuses this one: give both the same {KEY_VARIABLE}.")
        return Ended("its connection was lost.") if ended else None


def watch_silence(socket: zmq.Socket[bytes]) -> None:
    """ZeroMQ's own thread asks and answers, however busy this process is."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, SILENCE_MS // 5)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
