"""`--launch N`: engines on this machine, started as commands and restarted when they end.

An engine keeps its port, so it stays the same worker after a restart. It leaves rotation when its process ends, and
never outlives the gateway. If one fails before any has served, the gateway ends.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bough.core.child_environment import child_environment
from bough.core.errors import BoughError, EngineDeadError
from bough.core.gateway_settings import GatewaySettings
from bough.core.settings import Settings
from bough.gateway.processes import end_process, private_folder
from bough.gateway.registry import LAUNCHED, Registry, RegistryListener
from bough.gateway.worker import Worker
from bough.server.http import cancel_all

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
POLL_S = 0.05
COMPLAINTS = (1, 2)  # what `bough serve` ends with when its model or its flags cannot be used
GRACE_S = 10.0  # for an engine that was asked to end and has nothing to do any more
KEY_VARIABLES = ("BOUGH_API_KEY", "BOUGH_ADMIN_API_KEY")
PR_SET_PDEATHSIG = 1  # of prctl(2): a signal for a child whose parent has died


class LocalEngine:
    def __init__(self, number: int, worker: Worker) -> None:
        self.number = number
        self.worker = worker
        self.process: asyncio.subprocess.Process | None = None
        self.replacing = asyncio.Event()  # its end is wanted: it is to be started again without a pause
        self.in_replacement = False
        self.keeping: asyncio.Task[None] | None = None  # starts it again and again

    @property
    def holds_memory(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        log.info("engine %d starts at %s", self.number, self.worker.url)
        # Without keys for a server of the user's: the gateway knows only the key that it sets.
        kept = {name: value for name, value in child_environment().items() if name not in KEY_VARIABLES}
        self.process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            env={**kept, **environment},
            start_new_session=True,  # Ctrl-C in a terminal reaches the gateway alone, which ends its engines in order
            preexec_fn=_die_with_parent,
        )
        self.worker.pid = self.process.pid

    async def end(self) -> None:
        if self.process is not None:
            await end_process(self.process, GRACE_S)


class LocalEngines(RegistryListener):
    def __init__(self, settings: GatewaySettings, registry: Registry, on_failure: Callable[[BoughError], None]) -> None:
        self._settings = settings
        self._registry = registry
        self._on_failure = on_failure
        self._machine = this_machine(settings.engine.model.device)
        self._engines: list[LocalEngine] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ports = free_ports(settings.launch)
        # Engines answer to nobody but the gateway: their ports would be ways around its keys and limits.
        self._key = settings.worker_api_key or secrets.token_urlsafe()
        self._cleanup = contextlib.ExitStack()

    @property
    def launched(self) -> tuple[tuple[str, str], ...]:
        return tuple((engine.worker.url, self._key) for engine in self._engines)

    def open(self) -> None:
        for number in range(self._settings.launch):
            worker = self._registry.add(f"http://127.0.0.1:{self._ports[number]}", self._key, source=LAUNCHED)
            worker.expected_back = True
            self._engines.append(LocalEngine(number, worker))
        for engine in self._engines:
            engine.keeping = self._begin(self._keep(engine))
        self._registry.listen(self)

    def removed(self, worker: Worker) -> None:
        """Ends a removed worker's engine after its last request."""
        for engine in self._engines:
            if engine.worker is worker and engine.keeping is not None:
                engine.keeping.cancel()
                self._begin(self._retire(engine))

    # ---- starting and ending

    async def close(self) -> None:
        await cancel_all(self._tasks)
        await asyncio.gather(*(engine.end() for engine in self._engines))
        self._cleanup.close()

    async def restart(self, worker: Worker) -> None:
        """Replaces a worker's process after its last request; returns at once."""
        engine = next(engine for engine in self._engines if engine.worker is worker)
        if not engine.in_replacement:
            engine.in_replacement = True
            self._begin(self._replace(engine))

    async def _replace(self, engine: LocalEngine) -> None:
        worker = engine.worker
        self._registry.drain(worker)
        await self._idle(worker)
        engine.replacing.set()
        self._registry.leave_rotation(worker, "it is being replaced")
        await engine.end()
        self._registry.drain(worker, draining=False)
        engine.in_replacement = False

    async def _retire(self, engine: LocalEngine) -> None:
        await self._idle(engine.worker)
        log.info("engine %d ends: its worker was removed", engine.number)
        await engine.end()

    async def _idle(self, worker: Worker) -> None:
        """Waits for the worker's last request, at most as long as a drain may take."""
        deadline = time.monotonic() + self._settings.drain_timeout_s
        while worker.leases and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)

    async def _keep(self, engine: LocalEngine) -> None:
        """Starts the engine, and restarts it whenever it ends; the pause grows while it never gets ready."""
        pause_s = FIRST_PAUSE_S
        while True:
            await self._wait_for_turn(engine)
            await engine.start(*self._command(engine.number))
            served = await self._watch(engine)
            engine.worker.restarts += 1
            if engine.replacing.is_set():
                engine.replacing.clear()
                continue
            self._check_hope(engine)
            pause_s = FIRST_PAUSE_S if served else min(pause_s * 2, LONGEST_PAUSE_S)
            log.warning("engine %d is started again in %.1f s", engine.number, pause_s)
            await asyncio.sleep(pause_s)

    def _check_hope(self, engine: LocalEngine) -> None:
        code = None if engine.process is None else engine.process.returncode
        if code in COMPLAINTS and not any(each.worker.ever_healthy for each in self._engines):
            problem = f"Engine {engine.number} of --launch ended with exit code {code} before any was ready."
            advice = "What it complained of stands above; model and flags of the engines are those behind `--`."
            raise EngineDeadError(f"{problem} {advice}")

    async def _wait_for_turn(self, engine: LocalEngine) -> None:
        """Engines on one GPU start one by one: each sizes its cache by the memory that is left."""
        mates = [e for e in self._engines if gpu_of(e.number, self._machine) == gpu_of(engine.number, self._machine)]
        while self._machine.gpus and any(e.holds_memory and not e.worker.in_rotation for e in mates if e is not engine):
            await asyncio.sleep(POLL_S)

    async def _watch(self, engine: LocalEngine) -> bool:
        """Waits for the end of its process; returns whether it had entered rotation."""
        process, worker = engine.process, engine.worker
        assert process is not None
        ended = asyncio.ensure_future(process.wait())
        deadline = time.monotonic() + self._settings.worker_startup_timeout_secs
        served = False
        while not ended.done():
            await asyncio.wait({ended}, timeout=POLL_S if not served else None)
            served = served or worker.in_rotation
            if not served and time.monotonic() > deadline:
                log.error("engine %d was not ready in time (--worker-startup-timeout-secs)", engine.number)
                await engine.end()
        code = process.returncode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        self._registry.leave_rotation(worker, f"its process has ended with {how}", ended=True)
        return served

    def _command(self, number: int) -> tuple[list[str], dict[str, str]]:
        settings = self._settings
        running = [engine.number for engine in self._engines if engine.holds_memory]
        flags, environment = share_of(number, settings.launch, running, self._machine, settings.engine)
        words = [sys.executable, "-m", "bough.cli.main", "serve", "--host", "127.0.0.1"]
        words += ["--port", str(self._ports[number]), *flags, *self._event_flags(number), *settings.engine_flags]
        # Whether they take clients' code is decided when the gateway starts: their own file may be another by now.
        code = str(settings.engine.scheduler.enable_custom_logit_processor)
        keys = dict.fromkeys(KEY_VARIABLES, self._key)  # management too: the gateway has judged who asks for it
        return words, {**environment, **keys, "BOUGH_ENABLE_CUSTOM_LOGIT_PROCESSOR": code}

    def _event_flags(self, number: int) -> list[str]:
        if self._settings.default_policy != "kv_events" or self._settings.engine.memory.kv_events_config is not None:
            return []
        base = f"ipc://{self._event_folder}/{number}"
        return ["--kv-events-config", f'{{"endpoint": "{base}.events", "replay_endpoint": "{base}.replays"}}']

    @cached_property
    def _event_folder(self) -> str:
        return self._cleanup.enter_context(private_folder())

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, BoughError):
            self._on_failure(error)
        elif error is not None:
            log.error("an engine is not looked after any more", exc_info=error)


def free_ports(count: int) -> list[int]:
    """Free ports, held together while they are looked for, so that they differ."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


# ---- how the engines of one machine share it

USABLE = 0.9  # of the memory; the rest is for what libraries and other programs take


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them


def this_machine(device: str) -> Machine:
    """The cores of this process, and the GPUs unless the engines run on the CPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = tuple(path.name.removeprefix("nvidia") for path in sorted(Path("/dev").glob("nvidia[0-9]*")))
    gpus = found if visible is None else tuple(filter(None, visible.split(",")))
    return Machine(cores, () if device == "cpu" or not found else gpus)


def gpu_of(number: int, machine: Machine) -> str | None:
    return machine.gpus[number % len(machine.gpus)] if machine.gpus else None


def share_of(
    number: int, engines: int, running: Sequence[int], machine: Machine, given: Settings
) -> tuple[list[str], dict[str, str]]:
    """An engine's share, as flags and environment, while those in `running` hold theirs; the user's own flags stand. On
    a GPU, `--mem-fraction-static` includes the engines that are there; on a CPU it is the share of the free memory."""
    flags: list[str] = []
    gpu = gpu_of(number, machine)
    environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
    if given.memory.mem_fraction_static is None and given.memory.max_total_tokens is None and engines > 1:
        mates = [other for other in range(engines) if gpu_of(other, machine) == gpu]
        present = sum(other in mates for other in running if other != number) if gpu is not None else 0
        flags += ["--mem-fraction-static", f"{USABLE * (present + 1) / len(mates):.3f}"]
    if given.model.cpu_threads is None:
        flags += ["--cpu-threads", str(max(1, machine.cores // engines))]
    return flags, environment
