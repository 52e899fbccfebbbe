"""A server that belongs to the process that started it: `python -m bough.launch.owned_server`, settings on standard
input. It serves like `bough serve`, and stops when its owner closes that input or is gone, however it went."""

import contextlib
import json
import re
import subprocess
import sys
from typing import Any

from bough.core.child_environment import child_environment, leave_with_parent
from bough.core.errors import BoughError, EngineDeadError
from bough.core.settings import Settings

READY = re.compile(r"served at (\S+)")
GRACE_S = 15.0  # what runs may finish


class OwnedServer:
    """The owner's end: starts the server, waits until it is ready, and ends it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        flat = Settings.from_flat({"port": 0, "log_level": "warning", **settings}).to_flat()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "bough.launch.owned_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            env=child_environment(),
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(flat) + "\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline() + self._process.stdout.readline()
        found = READY.search(said)
        if found is None:
            self.close()
            raise EngineDeadError(said.strip() or "The server did not start; see what it wrote to standard error.")
        self.url = found[1]

    def close(self) -> None:
        """Harmless when called twice."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def main() -> int:
    from bough.launch.service import serve

    settings = Settings.from_flat(json.loads(sys.stdin.buffer.readline()))
    leave_with_parent()
    try:
        serve(settings)
    except BoughError as error:
        print(error, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
