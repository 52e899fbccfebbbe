"""Where the examples run: `python examples/lang/NAME.py` starts the default model in this process; with an address
(such as http://127.0.0.1:30000) behind it, the example uses the server there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import bough as sgl


@contextmanager
def chosen_back_end() -> Iterator[None]:
    if len(sys.argv) > 1:
        sgl.set_default_backend(sgl.RuntimeEndpoint(sys.argv[1]))
        yield
    else:
        with sgl.Engine() as engine:
            sgl.set_default_backend(engine)
            yield
