"""What a trainer uses to hand its weights to an engine: a state dict in the forms that the engine takes, none of them
pickled. Names are the checkpoint's; tensors may be a part of the model's."""

import base64
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, wait
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save, save_file

from bough.core.control import WEIGHTS_GROUP
from bough.core.daemon_thread import in_daemon_thread
from bough.core.errors import RequestError
from bough.core.files import shared_file
from bough.distributed.cuda_ipc import shared_handles
from bough.distributed.weights_group import DEVICES, WeightsGroup, open_store

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
GATHER_BELOW = 16 << 20  # bytes


def json_body(named_tensors: NamedTensors, **options: Any) -> dict[str, Any]:
    """The body of `/update_weights_from_tensor`, in the place of SGLang's pickles."""
    return {"serialized_named_tensors": base64.b64encode(save(_plain(named_tensors))).decode(), **options}


@contextlib.contextmanager
def shared_tensors(named_tensors: NamedTensors, gather_below: int = GATHER_BELOW) -> Iterator[str]:
    """A file in shared memory, for `files` of `/update_weights_from_ipc`; it is gone afterwards. Tensors that are all
    on GPUs stay there, and the file has their handles: they must not change until the answer. Those with fewer bytes
    than `gather_below` are copied side by side first, so that the engine opens fewer handles."""
    tensors = dict(named_tensors)
    if tensors and all(tensor.is_cuda for tensor in tensors.values()):
        with shared_handles(tensors, gather_below) as content, shared_file(len(content)) as path:
            Path(path).write_bytes(content)
            yield path
        return
    tensors = _plain(tensors)
    with shared_file(sum(tensor.nbytes for tensor in tensors.values())) as path:
        save_file(tensors, path)
        yield path


class TrainerGroup:
    """The first rank of a group with an engine's ranks, to which tensors are sent without a copy in between. `ask`
    calls a route of the engine, or a method of an `Engine`, by its name with these fields, and raises if it is refused;
    it runs on a thread, because the engine answers when both have met."""

    def __init__(
        self,
        ask: Callable[[str, dict[str, Any]], Any],
        world_size: int = 2,
        *,
        address: str = "127.0.0.1",
        port: int = 0,
        group_name: str = WEIGHTS_GROUP,
        backend: str = "gloo",
        timeout_s: float = 600.0,
    ) -> None:
        """`world_size`: the engine's ranks and one. The `address` of this host is how the engine finds it."""
        self._ask, self._name, self._backend = ask, group_name, backend
        store = open_store(address, port, world_size, timeout_s, first=True)
        place = {"master_address": address, "master_port": store.port, "rank_offset": 1, "world_size": world_size}
        asked = in_daemon_thread(
            ask, "init_weights_update_group", {**place, "group_name": group_name, "backend": backend}
        )
        meeting = in_daemon_thread(WeightsGroup, store, group_name, 0, world_size, backend, timeout_s)
        wait((asked, meeting), return_when=FIRST_EXCEPTION)
        for each in (asked, meeting) if asked.done() else (meeting, asked):  # the engine's reason, where it has one
            each.result()
        self._group: WeightsGroup = meeting.result()

    def update(self, named_tensors: NamedTensors, **options: Any) -> Any:
        """Sends tensors, and returns the engine's answer. Options: flush_cache, abort_all_requests, weight_version."""
        device = DEVICES[self._backend]
        tensors = {name: tensor.detach().to(device).contiguous() for name, tensor in dict(named_tensors).items()}
        fields = {
            "names": list(tensors),
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
            "group_name": self._name,
        }
        asked = in_daemon_thread(self._ask, "update_weights_from_distributed", {**fields, **options})
        try:
            for tensor in tensors.values():
                self._group.broadcast(tensor, lambda: not asked.done())
        except RequestError:
            if not asked.done():
                raise
        return asked.result()

    def close(self) -> None:
        self._group.close()
        self._ask("destroy_weights_update_group", {"group_name": self._name})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _plain(named_tensors: NamedTensors) -> dict[str, torch.Tensor]:
    """Contiguous, on the host, and none in the memory of another: what safetensors can hold."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in dict(named_tensors).items()}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return tensors
