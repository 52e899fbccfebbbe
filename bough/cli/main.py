"""The entry of `bough`: picks a sub-command, runs it, and turns whatever ends it into an exit code.

0 all went well; 1 an error with one sentence on standard error; 2 something the user typed cannot be used; 130 Ctrl-C;
141 the reader of the output has left; 143 SIGTERM. A traceback means a defect in Bough.
"""

import contextlib
import errno
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

from bough.cli.commands import HELP_FLAGS, Menu, commands_of, without_keys
from bough.core.errors import BoughError, SettingsError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # no defect, whichever file it was

MENU = Menu(
    program="bough",
    about="Serves large language models. Without --model, commands use a small default model.",
    commands=commands_of("bough", "bough.cli"),
    flags={"--version": "show the version"},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    if argv is None and (shown := without_keys(sys.orig_argv)) != sys.orig_argv:
        importlib.import_module("setproctitle").setproctitle(" ".join(shown))  # all users can read the process list
    try:
        with _orderly_sigterm():
            code = _run(list(sys.argv[1:] if argv is None else argv))
            sys.stdout.flush()  # a reader that has left shows up here, not while the interpreter ends
            return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _silence_output()
        return 141
    except BoughError as error:
        print(f"bough: {error}", file=sys.stderr)
        return 2 if isinstance(error, SettingsError) else 1
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"bough: No file can have so long a name: {str(error.filename)[:100]}…", file=sys.stderr)
        elif error.errno in DISK_FULL:
            _report_full_disk(error)
        else:
            raise
        return 1


def _report_full_disk(error: OSError) -> None:
    try:
        sys.stdout.flush()
    except OSError:  # it was the output that found no room
        _silence_output()
    where = "" if error.filename is None else f" ({error.filename})"
    print(f"bough: Cannot write: {error.strerror}{where}. Make room there, or write elsewhere.", file=sys.stderr)


def _silence_output() -> None:
    """The interpreter flushes once more when it ends; that must not complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in HELP_FLAGS:
        print(MENU.help())
        return 0
    if argv[0] == "--version":
        from bough.version import __version__

        print(f"bough {__version__}")
        return 0
    try:
        return int(importlib.import_module(MENU.pick(argv).module).run(argv[1:]))
    except SystemExit as end:  # SIGTERM, or argparse's way out after its help or its one line of complaint
        return end.code if isinstance(end.code, int) else 0


@contextlib.contextmanager
def _orderly_sigterm() -> Iterator[None]:
    """Lets the command end its engine when it is told to go; told twice, it goes at once."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only that one may handle signals
        yield
        return
    earlier = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)


if __name__ == "__main__":
    sys.exit(main())
