"""Where one thread of this process spends its time: a second thread looks at its stack twice in a millisecond.

What has passed since the look before, on the clock and of the watched thread's CPU time, counts for what it is found
at. Native code lets go of the interpreter while it computes, so the watcher gets its turn then too, and sees the Python
function that called it; between such calls it is given the interpreter sooner than usual. Nothing is instrumented; what
the watched thread runs does not matter.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

INTERVAL_S = 0.0005
SWITCH_S = 1e-5  # by default a thread in Python code is left alone for 5 ms: it would only be seen outside of it

Classify = Callable[[list[str]], str | None]  # file paths on the stack, innermost first; None: does not count


@dataclass(slots=True)
class Spent:
    """Time in one class."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    looks: int = 0


class ThreadSampler:
    """Counts from entering its `with` block to leaving it. `spent` is by class."""

    def __init__(self, thread: int, classify: Classify) -> None:
        self._thread = thread
        self._classify = classify
        self._cpu_clock = _cpu_clock_of(thread)
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="sampler", daemon=True)
        self._switch_s = sys.getswitchinterval()
        self.spent: defaultdict[str, Spent] = defaultdict(Spent)

    def __enter__(self) -> ThreadSampler:
        sys.setswitchinterval(SWITCH_S)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._watcher.join()
        sys.setswitchinterval(self._switch_s)

    def _watch(self) -> None:
        wall, cpu = time.perf_counter(), self._cpu_clock()
        while not self._ended.wait(INTERVAL_S):
            found = self._classify(_files(sys._current_frames().get(self._thread)))
            wall_before, cpu_before = wall, cpu
            wall, cpu = time.perf_counter(), self._cpu_clock()
            if found is not None:
                spent = self.spent[found]
                spent.wall_s += wall - wall_before
                spent.cpu_s += cpu - cpu_before
                spent.looks += 1


def _cpu_clock_of(thread: int) -> Callable[[], float]:
    """Reads the CPU time of a thread; systems that keep none give the time on the clock."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.perf_counter
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)


def _files(frame: FrameType | None) -> list[str]:
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files
