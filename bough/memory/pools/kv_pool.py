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
    """Keys and values of every layer, for the key/value heads of this rank. A layer has as many pages as its KV group.

    `scales` has a pair for each layer, for keys and for values; without it, they are stored as they are.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: Sequence[int],
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        topology: Topology,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        self.page_size = page_size
        self.dtype = dtype
        heads = _local_kv_heads(config, topology)

        def empty(layer: int) -> torch.Tensor:
            slots = (pages[config.kv_group(layer)] + 1) * page_size
            tensor = torch.empty((slots, heads, config.head_dim), dtype=dtype, device=device)
            # A page table has page 0 where a window has passed. Nobody attends to that, but kernels read blocks that
            # begin there, and a stray NaN would survive a weight of 0.
            tensor[:page_size].zero_()
            return tensor

        self.keys = [empty(layer) for layer in range(config.num_layers)]
        self.values = [empty(layer) for layer in range(config.num_layers)]
        # Numbers of the host: kernels take them as arguments, and a captured graph keeps them.
        pairs = scales or [(1.0, 1.0)] * config.num_layers
        self.key_scales = [key for key, _ in pairs]
        self.value_scales = [value for _, value in pairs]

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype, topology: Topology) -> tuple[int, ...]:
        """What one token costs on this rank, over all layers of each KV group."""
        groups = [config.kv_group(layer) for layer in range(config.num_layers)]
        of_layer = 2 * _local_kv_heads(config, topology) * config.head_dim * dtype.itemsize
        return tuple(groups.count(group) * of_layer for group in range(len(config.kv_groups)))


def _local_kv_heads(config: ModelConfig, topology: Topology) -> int:
    held = topology.kv_slice_of(config.num_kv_heads)
    return int(held.stop) - int(held.start)
