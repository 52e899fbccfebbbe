"""The states of recurrent layers: for each page, what all layers keep of one sequence.

Numbers are float32, whatever the model computes in: a state is added to once for each token. Page 0 is scratch, where
padding is written.
"""

from __future__ import annotations

import torch

from bough.core.model_config import RecurrentConfig
from bough.memory.pools.group_pool import GroupPool

COPIED_BYTES = 64 << 20  # most that is held twice while pages are copied, unless one page has more


class StatePool(GroupPool):
    """That of recurrent layers."""

    def __init__(self, config: RecurrentConfig, pages: int, device: torch.device) -> None:
        layers = sum(config.layers)
        self._memory = torch.empty((pages + 1, layers, config.size), dtype=torch.float32, device=device)
        tails = (config.conv_width - 1) * config.channels
        matrices = (config.heads, config.key_dim, config.value_dim)
        places = {layer: sum(config.layers[:layer]) for layer, recurs in enumerate(config.layers) if recurs}
        # By layer: the last inputs of its convolution, and the matrices of its heads.
        self.tails = {
            layer: self._memory[:, place, :tails].view(pages + 1, config.conv_width - 1, config.channels)
            for layer, place in places.items()
        }
        self.matrices = {
            layer: self._memory[:, place, tails:].view(pages + 1, *matrices) for layer, place in places.items()
        }
        super().__init__([self._memory], 1, "states")

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Gives pages what others hold, one after the other: a source may be a later target. Source 0 stands for the
        state of an empty sequence. [n] int64 each"""
        some = COPIED_BYTES // max(1, self.page_bytes) or 1  # a stage may have none of the layers
        for begin in range(0, len(sources), some):
            taken = sources[begin : begin + some]
            held = self._memory.index_select(0, taken).masked_fill_((taken == 0)[:, None, None], 0.0)
            self._memory.index_copy_(0, targets[begin : begin + some], held)
