"""A process with an engine on a GPU that lends its pages to others, as a prefill engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bough.core.control import CopyPagesOut
from bough.disaggregation.transports import Ring
from bough.distributed.cuda_ipc import PageMemory
from tests.fakes.one_row import PROMPT, tokens_of


def export_pages(connection: Any, folder: Path) -> None:
    """Says which tokens it finds behind the prompt, then where the prompt's pages are, and what they hold."""
    from tests.executor.test_control_gpu import build

    executor = build(folder)
    width = executor.limits().copied_bytes(0)
    ring = Ring(PageMemory(), 64 * width * len(PROMPT))
    connection.send(tokens_of(executor))
    pages, held = np.arange(1, 1 + len(PROMPT), dtype=np.int32), {}
    while (number := connection.recv()) is not None:
        held[number], loan = ring.lend(len(pages) * width, ring.gpus)
        executor.control(CopyPagesOut(pages, held[number].reshape(len(pages), width))).wait()
        content = np.zeros((len(pages), width), dtype=np.uint8)
        executor.control(CopyPagesOut(pages, content)).wait()
        connection.send((loan, content))
