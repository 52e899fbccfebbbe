"""The table of operations for weights that are packed in tiles (`quant_linear`), as the native kernels want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bough.kernels.ops import Ops
from bough.kernels.quant_linear.packed import PackedWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedOps(Ops):
    """The common operations, and those with packed weights."""

    # Token ids, the table and a scale: the tokens' vectors.
    packed_embedding: Callable[[torch.Tensor, PackedWeight, float], torch.Tensor]
    # Rows, weights whose outputs stand side by side, and a bias: the product.
    packed_linear: Callable[[torch.Tensor, Sequence[PackedWeight], torch.Tensor | None], torch.Tensor]
