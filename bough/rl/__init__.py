"""What a trainer uses to hand its weights to an engine: a state dict in the forms that the engine takes, none of them
pickled. Names are the checkpoint's; tensors may be a part of the model's."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import save, save_file

from bough.core.files import shared_file

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]


def json_body(named_tensors: NamedTensors, **options: Any) -> dict[str, Any]:
    """The body of `/update_weights_from_tensor`, in the place of SGLang's pickles."""
    return {"serialized_named_tensors": base64.b64encode(save(_plain(named_tensors))).decode(), **options}


@contextlib.contextmanager
def shared_tensors(named_tensors: NamedTensors) -> Iterator[str]:
    """A file in shared memory, for `files` of `/update_weights_from_ipc`; it is gone afterwards."""
    tensors = _plain(named_tensors)
    with shared_file(sum(tensor.nbytes for tensor in tensors.values())) as path:
        save_file(tensors, path)
        yield path


def _plain(named_tensors: NamedTensors) -> dict[str, torch.Tensor]:
    """Contiguous, on the host, and none in the memory of another: what safetensors can hold."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in dict(named_tensors).items()}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return tensors
