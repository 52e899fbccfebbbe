"""The scheduler's timeline: host phases and device steps, as a file in Chrome's trace format (Perfetto).

Events are written without a buffer, so a crash loses none; viewers accept an array without its end. Phases also have
their CPU time (`tdur`). Nothing is written beyond `MAX_BYTES`, which is about what viewers can show.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bough.core.errors import SettingsError
from bough.observability.timeline import Span, Timeline, Times

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
HOST_LANE, DEVICE_LANE = 1, 2
LANES = {HOST_LANE: "scheduler loop", DEVICE_LANE: "device"}


def default_trace_path(home: Path) -> Path:
    return home / "traces" / f"steps-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"


class StepTrace(Timeline):
    """Its clock is the one of the executors' step times."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic, max_bytes: int = MAX_BYTES) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise SettingsError(
                f"Cannot write the step trace to {path} ({error.strerror or error}); set --step-trace-path."
            ) from None
        super().__init__()
        self.path = path
        self.clock = clock
        self._origin = clock()
        self._left = max_bytes
        self._process = os.getpid()
        self._before = b"[\n"  # what separates the next event from the one before
        self._note("process_name", HOST_LANE, name="bough::scheduler")
        for lane, name in LANES.items():
            self._note("thread_name", lane, name=name)
            self._note("thread_sort_index", lane, sort_index=lane)

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        began, began_cpu = self.clock(), time.thread_time()
        try:
            yield
        finally:
            details = {} if step is None else {"step": step}
            self.add(name, HOST_LANE, began, self.clock(), details, time.thread_time() - began_cpu)

    def committed(self, step: int, times: Times, span: Span | None, work: tuple[int, int]) -> None:
        super().committed(step, times, span, work)
        if span is not None:
            details = dict(zip(("step", "decodes", "prompt tokens"), (step, *work), strict=True))
            self.add(name_batch(*work), DEVICE_LANE, *span, details)

    def add(
        self, name: str, lane: int, start: float, end: float, details: dict[str, Any], cpu_s: float | None = None
    ) -> None:
        """An event from `start` to `end`, with its thread's CPU time."""
        at, lasted = 1e6 * (start - self._origin), 1e6 * (end - start)  # the format counts microseconds
        event = {"name": name, "ph": "X", "tid": lane, "ts": round(at, 3), "dur": round(lasted, 3)}
        self._write(event if cpu_s is None else {**event, "tdur": round(1e6 * cpu_s, 3)}, details)

    def close(self) -> None:
        """Completes the array: valid JSON needs it, viewers do not."""
        if not self._file.closed:
            self._file.write(b"\n]\n")
            self._file.close()

    def _note(self, kind: str, lane: int, **details: Any) -> None:
        self._write({"name": kind, "ph": "M", "tid": lane}, details)

    def _write(self, event: dict[str, Any], details: dict[str, Any]) -> None:
        text = json.dumps({**event, "pid": self._process, "args": details}, separators=(",", ":"))
        line = self._before + text.encode()
        if self._left < len(line):
            if self._left:
                log.warning("the step trace has reached its limit and ends here: %s", self.path)
            self._left = 0
            return
        self._left -= len(line)
        self._before = b",\n"
        self._file.write(line)


def name_batch(decodes: int, prompt_tokens: int) -> str:
    parts = [f"{decodes} decodes"] * bool(decodes) + [f"{prompt_tokens} prompt tokens"] * bool(prompt_tokens)
    return " + ".join(parts) or "empty"
