"""The key/value cache: two tensors per layer, addressed by slot (page * page_size + offset).

The pool owns memory, its number format and its scales; it does not know which pages are in use. Page 0 is scratch,
where padding is written. Memory is never filled: readers must not rely on what a page held before it was written.

Layers of one group may have heads of different width, and a layer may read what an earlier one keeps.

Of latent attention a layer has one tensor: its values are the first columns of its keys, and have their scale. Where
it is sparse, layers that choose tokens have a second tensor, of the keys by which they choose. These have at least 16
bits: a query that attends to other tokens is further off than one that attends to rounded ones.

In an 8-bit format a value is stored divided by its layer's scale, and saturated; readers multiply with the scale. A
prompt computed in one go attends with its keys as they were computed, one with a cached prefix to rounded ones, so
results may differ a little with what happens to be cached.
"""

import math
from collections.abc import Mapping, Sequence

import torch

from bough.core.errors import ResourceError
from bough.core.model_config import ModelConfig
from bough.distributed.topology import Topology
from bough.memory.pools.group_pool import GroupPool
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


def index_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of index keys in a cache of this type."""
    return dtype if dtype.itemsize > 1 else torch.bfloat16


class AttentionPool(GroupPool):
    """That of attention layers: keys and values of [slots, heads, head_dim] for each of `shapes`, or keys
    alone, of which the first `latent` columns are the values. `index` says which layers have index keys too, and how
    wide. A window group has fewer pages than one of full attention, and is otherwise the same."""

    def __init__(
        self,
        shapes: Mapping[int, tuple[int, int]],
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        latent: int | None = None,
        index: tuple[Sequence[int], int] = ((), 0),
    ) -> None:
        slots = (pages + 1) * page_size
        self.keys = [torch.empty((slots, *shape), dtype=dtype, device=device) for shape in shapes.values()]
        tensors, layers = list(self.keys), list(shapes)
        if latent is None:
            self.values = [torch.empty_like(keys) for keys in self.keys]
            tensors, layers = tensors + self.values, layers * 2
        else:
            self.values = [keys[..., :latent] for keys in self.keys]
        choosing, width = index
        self.index_keys = [torch.empty((slots, width), dtype=index_dtype(dtype), device=device) for _ in choosing]
        super().__init__([*tensors, *self.index_keys], page_size, "KV cache", [*layers, *choosing])


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
        latent = None if config.latent is None else config.latent.rank
        layers = _layers(config, topology)
        attention = [
            AttentionPool(shapes, pages[group], page_size, dtype, device, latent, _index(config, topology))
            for group, shapes in enumerate(layers)
        ]
        states = topology.states_of(config)
        self.states = None if states is None else StatePool(states, pages[-1], device)
        self.groups: tuple[GroupPool, ...] = (*attention, *(() if self.states is None else (self.states,)))
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for shapes, pool in zip(layers, attention, strict=True):
            kept.update(zip(shapes, zip(pool.keys, pool.values, strict=True), strict=True))
        sources = [config.kv_source(layer) for layer in range(config.num_layers)]
        nothing = (torch.empty(0, dtype=dtype, device=device),) * 2  # of layers that do not attend, or on other stages
        self.keys = [kept.get(source, nothing)[0] for source in sources]
        self.values = [kept.get(source, nothing)[1] for source in sources]
        choosing, _ = _index(config, topology)
        self.index_keys = dict(zip(choosing, attention[0].index_keys, strict=True))  # by layer
        # Numbers of the host: kernels take them as arguments, and a captured graph keeps them.
        pairs = scales or [(1.0, 1.0)] * config.num_layers
        self.key_scales = [pairs[source][0] for source in sources]
        self.value_scales = [pairs[source][1] for source in sources] if latent is None else self.key_scales

    def read_tokens(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of these slots [tokens]. [tokens, heads, head_dim] each"""
        values = read_slots(self.values[layer], slots, self.value_scales[layer], dtype)
        return read_slots(self.keys[layer], slots, self.key_scales[layer], dtype), values

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
        tensors = 2 if config.latent is None else 1
        choosing, width = _index(config, topology)
        of_index = len(choosing) * width * index_dtype(dtype).itemsize
        of_groups = (sum(map(math.prod, own.values())) for own in _layers(config, topology))
        return tuple(tensors * numbers * dtype.itemsize + of_index for numbers in of_groups)


def _index(config: ModelConfig, topology: Topology) -> tuple[list[int], int]:
    """Which layers have index keys, and how wide these are. Such models have one KV group."""
    index = None if config.latent is None else config.latent.index
    choosing = [layer for layer in config.choosing_layers if layer in topology.layers_of(config)]
    return choosing, 0 if index is None else index.head_dim


def read_slots(cache: torch.Tensor, slots: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What these slots of a tensor stand for."""
    numbers = cache if cache.itemsize > 1 else cache.view(torch.uint8)  # torch cannot index float8 everywhere
    found = numbers.index_select(0, slots).view(cache.dtype).to(dtype)
    return found if scale == 1.0 else found * scale


def _layers(config: ModelConfig, topology: Topology) -> list[dict[int, tuple[int, int]]]:
    """Of each group of attention the layers of this stage that keep something, with the heads of this rank and their
    width."""
    groups: list[dict[int, tuple[int, int]]] = [{} for _ in config.attention_groups]
    for layer in topology.layers_of(config):
        kv_heads, width = config.kv_shape(layer)
        held = topology.kv_slice_of(kv_heads)
        shape = (held.stop - held.start, width) if config.latent is None else (1, config.latent.width)
        if config.attends(layer) and config.kv_source(layer) == layer:
            groups[config.kv_group(layer)][layer] = shape
    return groups
