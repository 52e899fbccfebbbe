"""The key/value cache: two tensors per layer, addressed by slot (page * page_size + offset).

The pool owns memory, its number format and the scales that go with it, and nothing else: it does not know which pages
are in use, nor by whom. Page 0 is scratch, where padding is written; pages 1..pages are the ones that can be given to
requests. Memory is never filled: untouched pages cost no physical memory on the host, and readers must not rely on what
a page held before it was written.

In an 8-bit format a value is stored divided by its layer's scale, and saturated: what is too large becomes the largest
number there is. Readers multiply with the scale. So a prompt that is computed in one go attends with its keys and
values as they were computed, and one that finds a prefix cached attends to rounded ones: results may differ a little
with what happens to be cached, as they do with any other rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bough.core.errors import ResourceError
from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology

FORMATS = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def cache_dtype(name: str, activations: torch.dtype) -> torch.dtype:
    """The type that `--kv-cache-dtype` names; `auto` is that of the activations."""
    return activations if name == "auto" else FORMATS[name]


class KVPool:
    """Keys and values of every layer, for the key/value heads of this rank.

    `scales` has a pair for each layer, for keys and for values; without it, they are stored as they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        topology: Topology,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        self.dtype = dtype
        shape = ((pages + 1) * page_size, _local_kv_heads(config, topology), config.head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        # Numbers of the host: kernels take them as arguments, and a captured graph keeps them.
        pairs = scales or [(1.0, 1.0)] * config.num_layers
        self.key_scales = [key for key, _ in pairs]
        self.value_scales = [value for _, value in pairs]

    @property
    def page_bytes(self) -> int:
        """What one page takes, over all layers."""
        return sum(tensor.stride(0) * tensor.itemsize * self.page_size for tensor in self._tensors())

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """What the pages hold, all layers of a page together. uint8 [pages, page_bytes], on the pool's device"""
        return torch.cat([self._by_page(tensor).index_select(0, pages) for tensor in self._tensors()], dim=1)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        """Gives the pages what `read_pages` has read, there or in a pool of the same shape."""
        begin = 0
        for tensor in map(self._by_page, self._tensors()):
            tensor.index_copy_(0, pages, content[:, begin : begin + tensor.shape[1]])
            begin += tensor.shape[1]

    def release(self) -> None:
        """Gives the memory back; what the pages held is lost."""
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Takes the memory again, at other addresses; nothing is taken where there is too little."""
        try:
            for tensor in self._tensors():
                tensor.untyped_storage().resize_(tensor.nbytes)
        except RuntimeError as error:
            self.release()
            raise ResourceError(f"There is not enough free memory for the KV cache: {error}") from None

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.keys, *self.values]

    def _by_page(self, tensor: torch.Tensor) -> torch.Tensor:
        """[pages + 1, bytes of a page]"""
        return tensor.view(self.pages + 1, -1).view(torch.uint8)

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype, topology: Topology) -> int:
        """What one token costs on this rank, over all layers."""
        return 2 * config.num_layers * _local_kv_heads(config, topology) * config.head_dim * dtype.itemsize


def _local_kv_heads(config: ModelConfig, topology: Topology) -> int:
    held = topology.kv_slice_of(config.num_kv_heads)
    return int(held.stop) - int(held.start)
