"""The entry of every child process: `python -m bough.launch.child`, with its specification on standard input.

A fresh interpreter, because the parent may have threads and an event loop. When standard input ends, the parent is gone
and the child goes too. Standard output carries announcements, a line of JSON each; prints go to standard error. The
argument is a pipe that takes its stacks (`supervisor`).
"""

import faulthandler
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, BinaryIO

import setproctitle

from bough.core.child_environment import TITLE, leave_with_parent
from bough.core.errors import BoughError
from bough.launch.spec import STACK_SIGNAL, ChildSpec, Role

ENTRIES: dict[Role, str] = {
    "scheduler": "scheduler_process:run_scheduler",
    "detokenizer": "detokenizer_process:run_detokenizer",
    "server": "service:run_server",
    "executor": "rank_process:run_rank",
}


def main() -> None:
    gc.disable()  # imports make some hundred thousand objects that stay; collections would take a tenth of a start
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=int(sys.argv[1]), all_threads=True)
    announcements = _take_over_stdout()
    spec = ChildSpec.decode(sys.stdin.buffer.readline())
    at_parents_end: list[Callable[[str], None]] = []

    def leave(reason: str) -> None:
        for callback in at_parents_end:
            callback(reason)
        os._exit(1)

    leave_with_parent(leave)
    setproctitle.setproctitle(TITLE + spec.title)

    def announce(**news: Any) -> None:
        announcements.write(json.dumps(news).encode() + b"\n")
        announcements.flush()

    try:
        more = (at_parents_end,) if spec.role == "server" else ()
        resolve_name(f"bough.launch.{ENTRIES[spec.role]}")(spec, announce, *more)
    except BoughError as error:
        announce(fatal=str(error), kind=type(error).__name__)
        _exit(1)
    except BaseException as error:  # noqa: BLE001
        # Not handled, only reported on the way out: the supervisor ends the engine with these words.
        traceback.print_exc()
        announce(fatal=f"{type(error).__name__}: {error}", kind="defect")
        _exit(1)
    _exit(0)


def _take_over_stdout() -> BinaryIO:
    """Keeps the pipe to the parent for announcements alone, and sends ordinary prints to standard error."""
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return pipe


def _exit(code: int) -> None:
    """Ends at once: executor threads in the middle of a step must not hold the process up."""
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
