"""Starts an engine's child processes, watches them, and ends all of them when one dies. No orphan survives.

Owns the processes. Each has a thread that reads its announcements and then waits for its end; the first unexpected end
kills the others and is reported once, with the child's own words where it had any. A replica among several that serve
ends alone.
"""

import contextlib
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from bough.core import errors
from bough.core.child_environment import child_environment
from bough.core.errors import BoughError, EngineDeadError, RankLostError
from bough.launch.spec import STACK_SIGNAL, ChildSpec

log = logging.getLogger(__name__)

GRACE_S = 5.0  # how long a child may take to leave by itself
REASON_S = 2.0  # how long the end of a rank that lost another may wait for that one's own


class Child:
    def __init__(self, spec: ChildSpec) -> None:
        self.role, self.title = spec.role, spec.title
        self.dp_rank = None if spec.settings.get("enable_dp_attention") else spec.dp_rank  # these end together
        self.ready: dict[str, Any] | None = None
        self.fatal: str | None = None
        self.kind: str | None = None
        self.dismissed = False  # it was told to leave before the others
        self.process = _start(spec)

    def send(self, spec: ChildSpec) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died at once, which its watcher will see
            self.process.stdin.write(spec.encode())
            self.process.stdin.flush()

    def listen(self, on_ready: Callable[[], None]) -> int:
        """Takes announcements until the process ends; its exit code."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            news = json.loads(line)
            if "ready" in news:
                self.ready = news["ready"]
                on_ready()
            self.fatal, self.kind = news.get("fatal"), news.get("kind")
        return self.process.wait()

    def end_now(self, reason: str = "") -> None:
        """Kills it; a server process sees its input end, and sends its clients the reason first."""
        if self.role != "server":
            self.process.kill()
        elif self.process.stdin is not None and not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(reason.encode())
                self.process.stdin.close()

    def describe_end(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = f": {self.fatal}" if self.fatal else "."
        return f"The {self.title} process (pid {self.process.pid}) {how}{reason}"


def _start(spec: ChildSpec) -> subprocess.Popen[bytes]:
    # A process that is stuck can print its stacks, but not its name. So it has a pipe for them, which is read here.
    reading, writing = os.pipe()
    listener = () if spec.server is None else (spec.server.listener_fd,)
    try:
        # -P: a file in the user's folder that is called like a module must not be imported in its place.
        # A process group of its own: Ctrl-C in a terminal reaches the parent alone, which ends its children in order.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bough.launch.child", str(writing)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            pass_fds=(*listener, *spec.listeners.values(), writing),
            env=child_environment(),
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    name = spec.title if spec.server is None else f"{spec.role} {spec.server.number}"
    threading.Thread(target=_print_named, args=(f"{name} (pid {process.pid})", reading), daemon=True).start()
    return process


def print_own_stacks(name: str) -> None:
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        _print_named(f"{name} (pid {os.getpid()})", os.dup(file.fileno()))


def _print_named(name: str, descriptor: int) -> None:
    with open(descriptor, errors="replace") as lines:
        for line in lines:
            print(f"{name}: {line}", end="", file=sys.stderr, flush=True)


class Supervisor:
    def __init__(self) -> None:
        self.on_death: Callable[[EngineDeadError], None] = lambda error: None
        # Told of a replica that dies while others live.
        self.on_loss: Callable[[int, EngineDeadError], None] = lambda dp_rank, error: None
        self._changed = threading.Condition()
        self._closing = False
        self.follows = False  # the children serve the client of another host, which ends them
        self.at_end: Callable[[str], None] = lambda reason: None  # told once, before the children end; "": in order
        self.error: BoughError | None = None  # why the engine has ended, if a child has ended it
        self.children: list[Child] = []

    def start(self, specs: Sequence[ChildSpec]) -> None:
        """Starts the children one by one; `close` ends those that were started, whatever happens here."""
        for spec in specs:
            child = Child(spec)
            self.children.append(child)
            child.send(spec)
            threading.Thread(target=self._watch, args=(child,), daemon=True, name=f"watch-{child.title}").start()

    def wait_until_ready(self, timeout_s: float) -> dict[str, dict[str, Any]]:
        """What each announced, by title. Raises the error of the first that failed."""

        def known() -> bool:
            return self.error is not None or all(child.ready is not None for child in self.children)

        with self._changed:
            if not self._changed.wait_for(known, min(timeout_s, threading.TIMEOUT_MAX)):
                raise EngineDeadError(f"The engine was not ready within {timeout_s:g} s (--start-timeout-s).")
            if self.error is not None:
                raise self.error
            return {child.title: child.ready or {} for child in self.children}

    def print_stacks(self) -> None:
        """Has every child print where its threads are; those that have ended cannot."""
        for child in self.children:
            if child.process.poll() is None:
                child.process.send_signal(STACK_SIGNAL)

    def dismiss(self, role: str, timeout_s: float) -> None:
        leaving = [child for child in self.children if child.role == role]
        for child in leaving:
            child.dismissed = True
            child.process.terminate()
        deadline = time.monotonic() + timeout_s
        for child in leaving:
            with contextlib.suppress(subprocess.TimeoutExpired):  # `close` will not wait for it
                child.process.wait(max(0.0, deadline - time.monotonic()))

    def expect_endings(self) -> None:
        """The children are about to be told to end: from here on, an end is no death."""
        with self._changed:
            in_order, self._closing = not self._closing, True
        if in_order:
            self.at_end("")

    def close(self) -> None:
        """Waits for the children, which were told to end, and kills those that do not."""
        self.expect_endings()
        deadline = time.monotonic() + GRACE_S
        for child in self.children:
            if child.ready is None:  # it is still loading and does not hear what it is told
                child.process.kill()
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.warning("the %s process did not leave by itself and is killed", child.title)
                child.process.kill()
                child.process.wait()
        for child in self.children:
            for pipe in (child.process.stdin, child.process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # what the child did not live to read
                        pipe.close()

    def _watch(self, child: Child) -> None:
        code = child.listen(self._notify)
        with self._changed:
            if child.kind == RankLostError.__name__:
                self._changed.wait_for(lambda: self._closing or child.dismissed, REASON_S)
            # Who told it so is ending itself: its leader, or the client on the first host.
            left_in_order = not code and (child.role == "executor" or self.follows)
        if not left_in_order:
            self._lose(child, child.describe_end(code))

    def end_replica(self, dp_rank: int, reason: str) -> None:
        """Of several: one that hangs. Nobody waits for its processes, which may not even die."""
        for child in self.children:
            if child.dp_rank == dp_rank:
                self._lose(child, reason)

    def _lose(self, child: Child, text: str) -> None:
        with self._changed:
            if self._closing or child.dismissed:
                return
            lost = self._replica_of(child)
            for each in lost:
                each.dismissed = True
            self._changed.notify_all()
        if lost and child.dp_rank is not None:
            log.error("%s Replica %d is dead; the others serve on.", text, child.dp_rank)
            for each in lost:
                each.end_now()
            self.on_loss(child.dp_rank, EngineDeadError(text))
            return
        self.fail(_as_error(child, text), text)

    def fail(self, error: BoughError, reason: str = "") -> None:
        """Ends the engine, unless it ends already. Who used it is told the reason, or the error."""
        with self._changed:
            if self._closing:
                return
            self._closing, self.error = True, error
            self._changed.notify_all()
        reason = reason or str(error)
        self.at_end(reason)
        self.end_now(reason)
        self.on_death(EngineDeadError(reason))

    def _replica_of(self, child: Child) -> list[Child]:
        """The processes that end with a child; none: all do, because no other replica serves."""
        if child.dp_rank is None or any(each.ready is None for each in self.children):
            return []
        alive = {each.dp_rank for each in self.children if not each.dismissed} - {None, child.dp_rank}
        return [each for each in self.children if each.dp_rank == child.dp_rank] if alive else []

    def end_now(self, reason: str = "") -> None:
        for child in list(self.children):
            child.end_now(reason)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()


def _as_error(child: Child, text: str) -> BoughError:
    """The child's own error where it announced one while it loaded; else how it ended."""
    known = getattr(errors, child.kind or "", None)
    if child.fatal and isinstance(known, type) and issubclass(known, BoughError) and child.ready is None:
        return known(child.fatal)
    return EngineDeadError(text)
