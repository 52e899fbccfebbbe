"""What is done to the fleet. Each fault takes effect, lasts a few seconds and is undone; its return value says what
was done, or is empty where it is not permitted here."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import psutil

from tests.system.chaos.fleet import KINDS, Fleet

Fault = Callable[[Fleet, random.Random], Awaitable[str]]
LIMITED = ("server", "scheduler", "detokenizer", "gateway")
LORIS = 120  # connections
DAY_S = 86400.0
CGROUP = Path("/sys/fs/cgroup/memory")
HOG = "import time; held = []\nwhile True: held.append(bytearray(b'x' * (1 << 20))); time.sleep(0.002)"


def victim(fleet: Fleet, draw: random.Random, kind: str) -> psutil.Process | None:
    found = fleet.of_kind(kind)
    return draw.choice(found) if found else None


def kill(kind: str) -> Fault:
    async def fault(fleet: Fleet, draw: random.Random) -> str:
        process = victim(fleet, draw, kind)
        if process is None:
            return ""
        if "gateway" in kind:
            fleet.note_gateway_kill()
        fleet.send(process, signal.SIGKILL)
        return f"killed {kind} {process.pid}"

    return fault


def stop(kind: str) -> Fault:
    async def fault(fleet: Fleet, draw: random.Random) -> str:
        process = victim(fleet, draw, kind)
        if process is None:
            return ""
        seconds = draw.choice([1.0, 3.0, 8.0])
        fleet.send(process, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            fleet.send(process, signal.SIGCONT)
        return f"stopped {kind} {process.pid} for {seconds:g} s"

    return fault


@contextlib.contextmanager
def limited(processes: list[psutil.Process], what: int, bound: Callable[[psutil.Process], int]) -> Iterator[None]:
    """A lower soft limit of other processes, as `prlimit` sets it."""
    before = []
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                soft, hard = process.rlimit(what)
                process.rlimit(what, (bound(process), hard))
                before.append((process, soft, hard))
        yield
    finally:
        for process, soft, hard in before:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.rlimit(what, (soft, hard))


async def full_disk(fleet: Fleet, draw: random.Random) -> str:
    if not fleet.disk_is_small:
        return ""
    filler = fleet.disk / "filler"
    try:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:  # the error is what is wanted
            while True:
                file.write(bytes(4096))
        await asyncio.sleep(6.0)
    finally:
        filler.unlink(missing_ok=True)
    return "filled the disk of sockets and stored keys and values for 6 s"


async def no_writing(fleet: Fleet, draw: random.Random) -> str:
    process = victim(fleet, draw, "server")
    family = fleet.engine_of(process) if process else []
    with limited(family, resource.RLIMIT_FSIZE, lambda process: 0):
        await asyncio.sleep(5.0)
    return f"no file of engine {process.pid} may grow for 5 s" if process and family else ""


def no_descriptors(kind: str) -> Fault:
    async def fault(fleet: Fleet, draw: random.Random) -> str:
        process = victim(fleet, draw, kind)
        if process is None:
            return ""
        with limited([process], resource.RLIMIT_NOFILE, lambda process: process.num_fds()):
            await asyncio.sleep(5.0)
        return f"no further descriptor for {kind} {process.pid} for 5 s"

    return fault


async def no_address_space(fleet: Fleet, draw: random.Random) -> str:
    process = victim(fleet, draw, "scheduler")
    if process is None:
        return ""
    with limited([process], resource.RLIMIT_AS, lambda process: process.memory_info().vms):
        await asyncio.sleep(4.0)
    return f"no further memory for scheduler {process.pid} for 4 s"


async def out_of_memory(fleet: Fleet, draw: random.Random) -> str:
    """The kernel's OOM killer, in a control group with a hog, so that it looks at nothing else on the machine."""
    group = CGROUP / f"chaos{draw.getrandbits(32)}"
    process = victim(fleet, draw, "scheduler")
    try:
        if process is None or not (CGROUP / "memory.limit_in_bytes").exists():
            return ""
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(48 << 20))
        hog = subprocess.Popen([sys.executable, "-c", HOG])
    except OSError:
        return ""
    try:
        for pid in (hog.pid, process.pid):
            with contextlib.suppress(OSError):
                (group / "cgroup.procs").write_text(str(pid))
        await asyncio.sleep(5.0)
    finally:
        hog.kill()
        hog.wait()
        for pid in (group / "cgroup.procs").read_text().split():  # a group with members cannot be removed
            with contextlib.suppress(OSError):
                (CGROUP / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            group.rmdir()
    killed = "was killed" if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE else "survived"
    return f"memory ran out beside scheduler {process.pid}, which {killed}"


async def slow_loris(fleet: Fleet, draw: random.Random) -> str:
    """Connections that send a byte now and then and never come to an end: half in their headers, half in a body."""
    host, port = fleet.url.removeprefix("http://").split(":")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    writers = []
    for number in range(LORIS):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head + (b"Content-Length: 1000\r\n\r\n{" if number % 2 else b"X-Slow: "))
            writers.append(writer)
    for _ in range(8):
        await asyncio.sleep(1.0)
        for writer in writers:
            writer.write(b" ")
    for writer in writers:
        writer.transport.abort()
    return f"{len(writers)} connections sent a byte a second for 8 s"


async def black_hole(fleet: Fleet, draw: random.Random) -> str:
    if not fleet.cut_network(True):
        return ""
    seconds = draw.choice([2.0, 10.0])
    try:
        await asyncio.sleep(seconds)
    finally:
        fleet.cut_network(False)
    where = "in its network namespace" if fleet.namespace else "on its wire"
    return f"the third engine's packets vanished {where} for {seconds:g} s"


async def silent_wire(fleet: Fleet, draw: random.Random) -> str:
    fleet.wire.set("silent")
    try:
        await asyncio.sleep(5.0)
    finally:
        fleet.wire.set("pass")
    return "the third engine's connections were open and silent for 5 s"


async def corrupt_replies(fleet: Fleet, draw: random.Random) -> str:
    before = fleet.wire.corrupted
    fleet.wire.set("corrupt")
    try:
        await asyncio.sleep(4.0)
    finally:
        fleet.wire.set("pass")
    return f"{fleet.wire.corrupted - before} replies of the third engine were corrupt"


async def clock_jump(fleet: Fleet, draw: random.Random) -> str:
    if not fleet.clock_can_jump:
        return ""
    try:
        for offset_s in (DAY_S, -400 * DAY_S, 3600.0):
            fleet.set_clock(offset_s)
            await asyncio.sleep(2.0)
            seen_s = await fleet.wall_clock() - time.time()
            if abs(seen_s - offset_s) > 60.0:
                raise RuntimeError(f"the clock was set {offset_s} s ahead, and an engine's is {seen_s} s ahead")
    finally:
        fleet.set_clock(0.0)
    return "the wall clock went a day ahead, 400 days back, an hour ahead, and back"


FAULTS: dict[str, Fault] = {
    **{f"SIGKILL {kind}": kill(kind) for kind in KINDS},
    **{f"SIGSTOP {kind}": stop(kind) for kind in KINDS},
    **{f"descriptors of {kind}": no_descriptors(kind) for kind in LIMITED},
    "full disk": full_disk,
    "file-size limit": no_writing,
    "address space": no_address_space,
    "OOM killer": out_of_memory,
    "slow loris": slow_loris,
    "black hole": black_hole,
    "silent wire": silent_wire,
    "corrupt replies": corrupt_replies,
    "clock jumps": clock_jump,
}
