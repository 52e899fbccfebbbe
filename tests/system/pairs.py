"""Prefill and decode engines as a user starts them; always ended."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.system.serving import TINY, Server, running


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def prefill_engine(model: Path, *flags: str) -> Iterator[tuple[Server, int]]:
    """With its bootstrap port."""
    port = free_port()
    mode = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port))
    with running("--model-path", str(model), *TINY, *mode, *flags) as server:
        yield server, port


@contextlib.contextmanager
def decode_engine(model: Path, *flags: str) -> Iterator[Server]:
    with running("--model-path", str(model), *TINY, "--disaggregation-mode", "decode", *flags) as server:
        yield server


def prompt_of(length: int, first: int = 3) -> Sequence[int]:
    return [first + (i * 7) % 50 for i in range(length)]
