"""One line per event on standard error: time, level, process, text.

Standard output belongs to the commands' results, so nothing is ever logged there.
"""

from __future__ import annotations

import logging
import sys

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def set_up_logging(role: str, level: str) -> None:
    """Sends the `bough` loggers of this process to standard error. `role` tells the engine's processes apart."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {role}: %(message)s", "%H:%M:%S"))
    root = logging.getLogger("bough")
    root.handlers[:] = [handler]
    root.setLevel(LEVELS[level])
    root.propagate = False
