"""Keeps the garbage collector from slowing the start of a process, and from stalling it while it serves.

For processes of the engine's own: a caller's process keeps its collector as it is.
"""

from __future__ import annotations

import gc


def put_off_garbage() -> None:
    """Called first. Imports make some hundred thousand objects that stay; looking through them again and again while
    there are ever more of them takes a tenth of a start."""
    gc.disable()


def keep_modules() -> None:
    """Called when the modules are there, before a model is loaded: collections need not look at them any more."""
    gc.freeze()
    gc.enable()


def settle_garbage() -> None:
    """Called when a process is ready. What lives then (modules, tokenizer, model) lives for good; a full collection
    would look through all of it again and again and hold up every stream for about 15 ms."""
    gc.collect()
    gc.freeze()
    gc.enable()
