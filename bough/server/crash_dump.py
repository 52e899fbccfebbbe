"""The last requests of an HTTP process, written to a file when the engine dies (`--crash-dump-folder`).

Owns the bodies of the last minutes, in memory, up to a limit. `bough replay` sends them again.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

KEPT_S = 300.0
KEPT_BYTES = 64 << 20


@dataclass(slots=True)
class Recorded:
    time: float  # seconds since 1970
    path: str
    body: bytes  # JSON
    finished: bool = False


class RequestRecorder:
    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._requests: deque[Recorded] = deque()
        self._bytes = 0

    def add(self, path: str, body: bytes) -> Recorded:
        now = self._clock()
        recorded = Recorded(now, path, body)
        self._requests.append(recorded)
        self._bytes += len(body)
        while self._requests and (self._bytes > KEPT_BYTES or now - self._requests[0].time > KEPT_S):
            self._bytes -= len(self._requests.popleft().body)
        return recorded

    def write(self, reason: str) -> Path | None:
        """The file with a request on each line, oldest first; None when there is none, or it cannot be written."""
        if not self._requests:
            return None
        path = self._folder / f"crash_dump_{time.strftime('%Y%m%d-%H%M%S')}_{os.getpid()}.jsonl"
        lines = [
            msgspec.json.encode(
                {"time": r.time, "path": r.path, "finished": r.finished, "reason": reason, "body": msgspec.Raw(r.body)}
            )
            for r in self._requests
        ]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # prompts are private
                file.write(b"".join(line.replace(b"\n", b" ") + b"\n" for line in lines))
        except OSError as error:
            log.error("the last requests cannot be written to %s: %s", path, error)
            return None
        log.error("the last %d requests are in %s; `bough replay` sends them again", len(lines), path)
        return path
