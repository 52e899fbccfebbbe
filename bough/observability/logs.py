"""One log line per event on standard error, with the id of its request; standard output is for results."""

import logging
import sys
from contextvars import ContextVar

# Its id, and when HTTP brought it. It is set in the context of the request's own task.
current_request: ContextVar[tuple[str, float]] = ContextVar("current_request", default=("", 0.0))


def set_up_logging(role: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {role}: %(request)s%(message)s", "%H:%M:%S"))
    handler.addFilter(_add_request)
    root = logging.getLogger("bough")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def _add_request(record: logging.LogRecord) -> bool:
    identity = current_request.get()[0]
    record.request = f"[{identity}] " if identity else ""
    return True
