"""The key/value cache: two tensors per layer, addressed by slot (page * page_size + offset).

The pool owns memory and nothing else: it does not know which pages are in use, nor by whom. Page 0 is scratch, where
padding is written; pages 1..pages are the ones that can be given to requests. Memory is never filled: untouched pages
cost no physical memory on the host, and readers must not rely on what a page held before it was written.
"""

from __future__ import annotations

import torch

from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology


class KVPool:
    """Keys and values of every layer, for the key/value heads of this rank."""

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        topology: Topology,
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        self.dtype = dtype
        shape = ((pages + 1) * page_size, _local_kv_heads(config, topology), config.head_dim)
        self.keys = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self.values = [torch.empty(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype, topology: Topology) -> int:
        """What one token costs on this rank, over all layers."""
        return 2 * config.num_layers * _local_kv_heads(config, topology) * config.head_dim * dtype.itemsize


def _local_kv_heads(config: ModelConfig, topology: Topology) -> int:
    held = topology.kv_slice_of(config.num_kv_heads)
    return int(held.stop) - int(held.start)
