"""The key/value cache: two tensors per layer, addressed by slot (page * page_size + offset).

The pool owns memory, its number format and its scales; it does not know which pages are in use. Page 0 is scratch,
where padding is written. Memory is never filled: readers must not rely on what a page held before it was written.

Of latent attention a layer has one tensor: its values are the first columns of its keys, and have their scale.

In an 8-bit format a value is stored divided by its layer's scale, and saturated; readers multiply with the scale. A
prompt computed in one go attends with its keys as they were computed, one with a cached prefix to rounded ones, so
results may differ a little with what happens to be cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from bough.core.errors import ResourceError
from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology
from bough.memory.pools.state_pool import StatePool

FORMATS = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3": torch.float8_e4m3fn,
}


def cache_dtype(name: str, activations: torch.dtype) -> torch.dtype:
    """The type that `--kv-cache-dtype` names; `auto` is that of the activations."""
    return activations if name == "auto" else FORMATS[name]


class GroupPool(Protocol):
    """The memory of one KV group: what its layers keep of a token or a sequence, page by page. All layers of a page
    move together."""

    @property
    def page_bytes(self) -> int:
        """What one page takes, over all layers of the group."""
        ...

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """What the pages hold, all layers of a page together. uint8 [pages, page_bytes], on the pool's device"""
        ...

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        """Gives the pages what `read_pages` has read, there or in a pool of the same shape."""
        ...

    def release(self) -> None:
        """Gives the memory back; what the pages held is lost."""
        ...

    def restore(self) -> None:
        """Takes the memory again, at other addresses; nothing is taken where there is too little."""
        ...


class AttentionPool:
    """A `GroupPool` of attention layers: keys and values of [slots, heads, head_dim] for each, or keys alone, of which
    the first `latent` columns are the values. A window group has fewer pages than one of full attention, and is
    otherwise the same."""

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        latent: int | None = None,
    ) -> None:
        slots = (pages + 1) * page_size
        self._page_size = page_size
        self.keys = [torch.empty((slots, *shape), dtype=dtype, device=device) for _ in range(layers)]
        if latent is None:
            self.values = [torch.empty((slots, *shape), dtype=dtype, device=device) for _ in range(layers)]
            self._tensors = (*self.keys, *self.values)
        else:
            self.values = [keys[..., :latent] for keys in self.keys]
            self._tensors = tuple(self.keys)
        self._clear_scratch()

    @property
    def page_bytes(self) -> int:
        return sum(tensor.stride(0) * tensor.itemsize * self._page_size for tensor in self._tensors)

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._by_page(tensor).index_select(0, pages) for tensor in self._tensors], dim=1)

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        begin = 0
        for tensor in map(self._by_page, self._tensors):
            tensor.index_copy_(0, pages, content[:, begin : begin + tensor.shape[1]])
            begin += tensor.shape[1]

    def release(self) -> None:
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        try:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(tensor.nbytes)
        except RuntimeError as error:
            self.release()
            raise ResourceError(f"There is not enough free memory for the KV cache: {error}") from None
        self._clear_scratch()

    def _clear_scratch(self) -> None:
        """A page table has page 0 where a window has passed. Nobody attends to that, but kernels read blocks that begin
        there, and a stray NaN would survive a weight of 0."""
        for tensor in self._tensors:
            tensor[: self._page_size].zero_()

    def _by_page(self, tensor: torch.Tensor) -> torch.Tensor:
        """[pages + 1, bytes of a page]"""
        return tensor.view(len(tensor) // self._page_size, -1).view(torch.uint8)


class KVPool:
    """Keys and values of every layer, for the key/value heads of this rank, in the pools of the KV groups.

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
        group_of = _groups_of_layers(config)
        shape, latent = (_local_kv_heads(config, topology), config.head_dim), None
        if config.latent is not None:
            shape, latent = (1, config.latent.width), config.latent.rank
        attention = [
            AttentionPool(group_of.count(group), pages[group], page_size, shape, dtype, device, latent)
            for group in range(len(config.attention_groups))
        ]
        self.states = None if config.states is None else StatePool(config.states, pages[-1], device)
        self.groups: tuple[GroupPool, ...] = (*attention, *(() if self.states is None else (self.states,)))
        # By layer; those that do not attend have none.
        nothing = torch.empty(0, dtype=dtype, device=device)
        self.keys, self.values = [nothing] * config.num_layers, [nothing] * config.num_layers
        for layer, group in enumerate(group_of):
            if group is not None:
                place = group_of[:layer].count(group)
                self.keys[layer], self.values[layer] = attention[group].keys[place], attention[group].values[place]
        # Numbers of the host: kernels take them as arguments, and a captured graph keeps them.
        pairs = scales or [(1.0, 1.0)] * config.num_layers
        self.key_scales = [key for key, _ in pairs]
        self.value_scales = [value for _, value in pairs] if latent is None else self.key_scales

    def release(self) -> None:
        """Gives the memory of all groups back."""
        for group in self.groups:
            group.release()

    def restore(self) -> None:
        """Takes it again, all or nothing."""
        try:
            for group in self.groups:
                group.restore()
        except ResourceError:
            self.release()
            raise

    @staticmethod
    def bytes_per_token(config: ModelConfig, dtype: torch.dtype, topology: Topology) -> tuple[int, ...]:
        """What one token costs on this rank, over all layers of each group of attention."""
        groups = _groups_of_layers(config)
        of_layer = 2 * _local_kv_heads(config, topology) * config.head_dim
        if config.latent is not None:
            of_layer = config.latent.width
        return tuple(groups.count(group) * of_layer * dtype.itemsize for group in range(len(config.attention_groups)))


def _groups_of_layers(config: ModelConfig) -> list[int | None]:
    """The group of each layer's keys and values; None: it has none."""
    return [config.kv_group(layer) if config.attends(layer) else None for layer in range(config.num_layers)]


def _local_kv_heads(config: ModelConfig, topology: Topology) -> int:
    held = topology.kv_slice_of(config.num_kv_heads)
    return int(held.stop) - int(held.start)
