"""The group that a trainer makes with the ranks of an engine: its first rank, the trainer's, sends tensors to all.

It stands beside the engine's own group: a trainer that dies, or does not come, ends this one alone. Ranks find each
other as in SGLang's groups, so its trainers can be the first rank as they are.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from bough.core.errors import RequestError
from bough.distributed.group import interface_to, reason_of

dist: Any = torch.distributed  # its types do not tell of stores and of groups apart from the process's own
DEVICES = {"gloo": "cpu", "nccl": "cuda"}  # whose memory each backend sends
LOOK_S = 0.0005  # between two looks at a tensor under way
GRACE_S = 5.0  # for one that is no longer waited for
SLACK_S = 600.0  # NCCL's own watchdog ends the process, so it must wait longer than the limit


@contextlib.contextmanager
def _refused(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise RequestError(f"{what}: {reason_of(error)}") from None


def open_store(address: str, port: int, world_size: int, timeout_s: float, *, first: bool = False) -> Any:
    """Where ranks find each other: the first opens it, at any free port if that is 0; the others reach it."""
    with _refused(f"There is no group at {address}:{port} within {timeout_s:g} s"):
        timeout = timedelta(seconds=timeout_s)
        return dist.TCPStore(address, port, world_size, first, timeout, wait_for_workers=not first)


class WeightsGroup:
    """One rank's place in it. `timeout_s` is for the meeting, and then for each tensor."""

    def __init__(self, store: Any, name: str, rank: int, world_size: int, backend: str, timeout_s: float) -> None:
        """Waits for the others."""
        self.device, self._timeout_s, address = DEVICES[backend], timeout_s, f"{store.host}:{store.port}"
        for prefix in (name, f"{name}/", f"{self.device}/"):  # as torch and SGLang name what they keep there
            store = dist.PrefixStore(prefix, store)
        with _refused(f"Not all of the {world_size} ranks of {name} have come within {timeout_s:g} s"):
            if backend == "nccl":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=timeout_s + SLACK_S)
                self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)
                return
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(interface=interface_to(address))]
            options._timeout = timedelta(seconds=timeout_s)
            self._group = dist.ProcessGroupGloo(store, rank, world_size, options)

    def broadcast(self, tensor: torch.Tensor, go_on: Callable[[], bool] = lambda: True) -> torch.Tensor:
        """Sends a tensor from the first rank, or receives it in its memory, as long as `go_on` says so."""
        until = time.monotonic() + self._timeout_s
        with _refused("A tensor did not arrive"), contextlib.ExitStack() as failing:
            failing.callback(self.close)
            # As bytes: not every backend knows every number format.
            work = self._group.broadcast(tensor.view(-1).view(torch.uint8), 0) if tensor.numel() else None
            while work is not None and not work.is_completed():
                if not go_on():  # what was sent may still be on its way into the sockets
                    until, go_on = min(until, time.monotonic() + GRACE_S), lambda: True
                if time.monotonic() > until:
                    raise RuntimeError(f"the others did not take part in time ({self._timeout_s:g} s)")
                time.sleep(LOOK_S)
            if work is not None:
                work.wait()
            failing.pop_all()
        return tensor

    def close(self) -> None:
        """Lets the others find out at once, too."""
        self._group.abort()
