"""One log line per event on standard error, with the id of its request; standard output is for results."""

import logging
import sys
from contextvars import ContextVar

current_request: ContextVar[str] = ContextVar("current_request", default="")
request_began: ContextVar[float] = ContextVar("request_began", default=0.0)  # when HTTP brought it


def set_up_logging(role: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {role}: %(request)s%(message)s", "%H:%M:%S"))
    handler.addFilter(_add_request)
    root = logging.getLogger("bough")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def _add_request(record: logging.LogRecord) -> bool:
    identity = current_request.get()
    record.request = f"[{identity}] " if identity else ""
    return True
