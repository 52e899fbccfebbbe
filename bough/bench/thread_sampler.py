"""Where one thread of this process spends its time, by the clock: a second thread looks at its stack every millisecond.

Native code lets go of the interpreter while it computes, so the watcher gets its turn then too, and sees the Python
function that called it. Nothing is instrumented; what the watched thread runs does not matter.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType

INTERVAL_S = 0.001

Classify = Callable[[list[str]], str | None]  # file paths on the stack, innermost first; None: does not count


class ThreadSampler:
    """Counts from entering its `with` block to leaving it. `counts` are samples by class."""

    def __init__(self, thread: int, classify: Classify) -> None:
        self._thread = thread
        self._classify = classify
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="sampler", daemon=True)
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> ThreadSampler:
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._watcher.join()

    def shares(self) -> dict[str, float]:
        """The share of each class, the largest first."""
        total = sum(self.counts.values())
        return {name: count / total for name, count in self.counts.most_common()}

    def _watch(self) -> None:
        while not self._ended.is_set():
            frame = sys._current_frames().get(self._thread)
            found = self._classify(_files(frame))
            if found is not None:
                self.counts[found] += 1
            time.sleep(INTERVAL_S)


def _files(frame: FrameType | None) -> list[str]:
    files = []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return files
