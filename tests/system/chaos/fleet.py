"""The fleet: a gateway of two processes with two engines of its own, a third engine behind a wire, where permitted in a
network namespace, and two engines of a tiny model that reads images. What dies is started again, as an operator's
supervisor would."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bough.gateway.launching import free_ports
from tests.multimodal.checkpoints import SPECS, write_model
from tests.system.chaos.load import SEEING
from tests.system.chaos.wire import Wire

KEY = "chaos-of-three-engines"
HEADERS = {"Authorization": f"Bearer {KEY}"}
START_S = 300.0
DISK_MB = 64
CACHE = ("--enable-hierarchical-cache", "--hicache-size", "0.05", "--hicache-storage-backend", "file")
ENGINE = ("--max-total-tokens", "12000", "--cpu-threads", "1", "--log-level", "warning", *CACHE)
# Images are preprocessed for each request anew, so that a fault of a worker process is felt.
IMAGES = ("--served-model-name", SEEING, "--mm-preprocess-cache-size-mb", "0", "--mm-processor-worker-num", "1")
SEES = ("--dtype", "float32", "--max-total-tokens", "4000", "--cpu-threads", "1", "--log-level", "warning", *IMAGES)
TEMPLATE = "{% for part in messages[0].content %}{{ part.text if part.type == 'text' else 'PLACE' }}{% endfor %}"
COMMAND = (sys.executable, "-m", "bough.cli.main")
GATEWAY = (
    *("--launch", "2", "--processes", "2", "--policy", "cost", "--log-level", "info"),
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "3", "--cb-timeout-duration-secs", "5"),
)
KINDS = ("server", "scheduler", "detokenizer", "compiler", "media worker", "gateway", "first gateway")


def ran(*words: str) -> bool:
    """Whether a command of the system works here."""
    try:
        return subprocess.run(words, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


class Fleet:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.disk_is_small = ran("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=0700", "chaos", str(self.disk))
        self.url = ""
        self.wire: Wire
        self.namespace = ""
        self.restarts = Counter[str]()
        self.gateway_outages: list[tuple[float, float]] = []  # begin and end; the last may be open
        self.gateway: subprocess.Popen[bytes]
        self.apart = dict[str, subprocess.Popen[bytes]]()  # the engines that are not the gateway's own
        self._commands = dict[str, tuple[str, ...]]()  # of those
        self._clock = folder / "clock"
        self._clock.write_bytes(struct.pack("d", 0.0))
        self._environment = self._prepare_environment()
        self._logs = 0
        self._down_since: float | None = None  # the gateway as a whole
        self._guard: asyncio.Task[None] | None = None
        self.session: aiohttp.ClientSession

    # Start and end ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Fleet:
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), headers=HEADERS)
        port, third, *seeing = map(str, free_ports(4))
        self.url = f"http://127.0.0.1:{port}"
        host = self._enter_namespace()
        self.wire = Wire(host, int(third))
        await self.wire.open()
        inside = ("ip", "netns", "exec", self.namespace) if self.namespace else ()
        self._commands["third engine"] = (*inside, *COMMAND, "serve", "--host", host, "--port", third, *ENGINE)
        checkpoint = self._write_checkpoint()
        for number, its in enumerate(seeing, 1):
            self._commands[f"seeing engine {number}"] = (*COMMAND, "serve", checkpoint, "--port", its, *SEES)
        self._workers = (self.wire.url, *(f"http://127.0.0.1:{its}" for its in seeing))
        self.apart, self.gateway = {name: self._start_engine(name) for name in self._commands}, self._start_gateway()
        await self.wait_for(3)
        self._guard = asyncio.create_task(self._restart_what_ends())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._guard is not None:
            self._guard.cancel()
        for process in (self.gateway, *self.apart.values()):
            for member in self._family(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.kill()
            process.wait()
        await self.wire.close()
        await self.session.close()
        if self.namespace:
            ran("ip", "netns", "delete", self.namespace)
        if self.disk_is_small:
            ran("umount", "-l", str(self.disk))

    def _prepare_environment(self) -> dict[str, str]:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("BOUGH_")}
        home = os.environ.get("BOUGH_HOME")
        shim = self.folder / "clock.so"
        source = Path(__file__).with_name("clock.c")
        self.clock_can_jump = shutil.which("gcc") is not None and ran(
            *("gcc", "-shared", "-fPIC", "-O1", "-o", str(shim), str(source), "-ldl", "-lm")
        )
        if self.clock_can_jump:
            environment |= {"LD_PRELOAD": str(shim), "CHAOS_CLOCK": str(self._clock)}
        store = self.disk / "kv"
        store.mkdir(mode=0o700)
        return environment | {
            **({"BOUGH_HOME": home} if home else {}),
            "TMPDIR": str(self.disk),
            "BOUGH_HICACHE_FILE_BACKEND_STORAGE_DIR": str(store),
            "BOUGH_GATEWAY_WORKER_API_KEY": KEY,
            "PYTHONUNBUFFERED": "1",
        }

    def _enter_namespace(self) -> str:
        """The third engine's address: in a network of its own where we may make one, else on loopback."""
        name, third = f"chaos{os.getpid()}", os.getpid() % 250
        ours, theirs = f"10.213.{third}.1", f"10.213.{third}.2"
        inside = ("ip", "netns", "exec", name, "ip")
        steps = [
            ("ip", "netns", "add", name),
            ("ip", "link", "add", f"ve{os.getpid()}", "type", "veth", "peer", "name", "eth0", "netns", name),
            ("ip", "address", "add", f"{ours}/30", "dev", f"ve{os.getpid()}"),
            ("ip", "link", "set", f"ve{os.getpid()}", "up"),
            (*inside, "address", "add", f"{theirs}/30", "dev", "eth0"),
            (*inside, "link", "set", "eth0", "up"),
            (*inside, "link", "set", "lo", "up"),
        ]
        if all(ran(*step) for step in steps):
            self.namespace = name
            self._ours = ours
            return theirs
        ran("ip", "netns", "delete", name)
        return "127.0.0.1"

    def _start(self, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        self._logs += 1
        with (self.folder / f"log-{self._logs}").open("wb") as log:
            environment = self._environment | variables
            return subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)

    def _write_checkpoint(self) -> str:
        folder = self.folder / SEEING
        folder.mkdir()
        write_model(folder, "llava")
        (folder / "chat_template.jinja").write_text(TEMPLATE.replace("PLACE", SPECS["llava"].place))
        return str(folder)

    def _start_engine(self, name: str) -> subprocess.Popen[bytes]:
        return self._start(*self._commands[name], BOUGH_API_KEY=KEY)

    def _start_gateway(self) -> subprocess.Popen[bytes]:
        words = (*COMMAND, "gateway", "--port", self.url.rpartition(":")[2])
        return self._start(*words, "--worker-urls", *self._workers, *GATEWAY, "--", *ENGINE)

    async def _restart_what_ends(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for name, process in self.apart.items():
                if process.poll() is not None:
                    self.restarts[name] += 1
                    self.apart[name] = self._start_engine(name)
            if self.gateway.poll() is not None:
                self.restarts["gateway"] += 1
                if self._down_since is None:
                    self._down_since = time.monotonic() - 1.0
                    self.gateway_outages.append((self._down_since, float("inf")))
                await asyncio.sleep(1.0)  # the port may still be another's
                self.gateway = self._start_gateway()
            elif self._down_since is not None and await self.healthy():
                outage = self.gateway_outages.index((self._down_since, float("inf")))
                self.gateway_outages[outage] = (self._down_since, time.monotonic())
                self._down_since = None

    # What it looks like -----------------------------------------------------------------------------------------------

    async def workers(self) -> list[dict[str, Any]]:
        try:
            async with self.session.get(f"{self.url}/workers", timeout=aiohttp.ClientTimeout(total=10)) as response:
                found: list[dict[str, Any]] = (await response.json())["workers"]
                return found
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError):
            return []

    async def healthy(self) -> list[dict[str, Any]]:
        return [worker for worker in await self.workers() if worker["is_healthy"]]

    async def wait_for(self, count: int) -> None:
        """For so many engines of the default model, and for both that see."""
        deadline = time.monotonic() + START_S
        while True:
            seeing = [worker["model_id"] == SEEING for worker in await self.healthy()]
            if seeing.count(True) == 2 and seeing.count(False) >= count:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"never {count} engines in rotation: {self.log()[-3000:]}")
            await asyncio.sleep(0.3)

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-20000:] for path in sorted(self.folder.glob("log-*")))

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """All of them with their kind."""
        found = []
        for root in (self.gateway, *self.apart.values()):
            for member in self._family(root):
                with contextlib.suppress(psutil.Error):
                    found.append((self._kind(member), member))
        return found

    def of_kind(self, kind: str) -> list[psutil.Process]:
        return [process for its, process in self.processes() if its == kind]

    def engine_of(self, process: psutil.Process) -> list[psutil.Process]:
        """The processes of the engine that it belongs to."""
        with contextlib.suppress(psutil.Error):
            for server in self.of_kind("server"):
                family = [server, *server.children(recursive=True)]
                if process in family:
                    return family
        return []

    def _family(self, root: subprocess.Popen[bytes]) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(root.pid)
            return [process, *process.children(recursive=True)]
        return []

    def _kind(self, process: psutil.Process) -> str:
        words = " ".join(process.cmdline())
        if process.pid == self.gateway.pid:
            return "first gateway"
        for mark, kind in (
            ("bough::scheduler", "scheduler"),
            ("bough::detokenizer", "detokenizer"),
            ("compiler_process", "compiler"),
            ("multimodal.worker", "media worker"),
            ("bough.gateway.service", "gateway"),
            (" serve ", "server"),
        ):
            if mark in words:
                return kind
        return "other"

    # What can be done to it as a whole --------------------------------------------------------------------------------

    def set_clock(self, offset_s: float) -> None:
        with self._clock.open("r+b") as file:
            file.write(struct.pack("d", offset_s))

    async def wall_clock(self) -> float:
        """As an engine tells it."""
        for worker in await self.healthy():
            async with self.session.get(f"{worker['url']}/v1/loads") as response:
                return float((await response.json())["timestamp"])
        raise RuntimeError("no engine tells the time")

    def cut_network(self, cut: bool) -> bool:
        """Answers of the third engine vanish in its namespace; without one the wire falls silent."""
        if self.namespace:
            inside = ("ip", "netns", "exec", self.namespace, "ip")
            return ran(*inside, "route", "add" if cut else "delete", "blackhole", f"{self._ours}/32")
        self.wire.set("silent" if cut else "pass")
        return True

    def was_killed_since(self, begin: float) -> bool:
        """Whether a gateway process that held a request begun then was."""
        return any(end >= begin for _, end in self.gateway_outages)

    def note_gateway_kill(self) -> None:
        """Connections that a killed gateway process holds break; its clients see that."""
        now = time.monotonic()
        self.gateway_outages.append((now - 0.1, now + 3.0))

    def send(self, process: psutil.Process, number: signal.Signals) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)
