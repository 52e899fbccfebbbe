"""Embedding scale and head soft cap."""

from __future__ import annotations

import torch

from bough.distributed.topology import Topology
from bough.layers.embedding import Embedding, Head
from bough.layers.schemes.plain import PlainTable
from tests.fakes.context import NO_CONTEXT
from tests.fakes.placements import placed


def test_scale_is_rounded_to_the_weights_type_and_leaves_them_alone() -> None:
    placement = placed(Topology(), torch.bfloat16, torch.device("cpu"))
    embedding = Embedding(5, 3, 33.9411, placement)
    weight = next(embedding.slots("embed.")).target
    weight.fill_(1.0)
    assert torch.equal(embedding(torch.tensor([2, 4]), NO_CONTEXT), torch.full((2, 3), 34.0, dtype=torch.bfloat16))
    assert torch.equal(weight, torch.ones(5, 3, dtype=torch.bfloat16))


def test_logits_can_be_capped() -> None:
    placement = placed(Topology(), torch.bfloat16, torch.device("cpu"))
    table = PlainTable(3, 3, placement)
    table.weight.copy_(torch.eye(3) * 1000)
    hidden = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.bfloat16)
    assert torch.equal(Head(table, None, placement)(hidden).float(), torch.tensor([[1000.0, -1000.0, 0.0]]))
    assert torch.equal(Head(table, 30.0, placement)(hidden), torch.tensor([[30.0, -30.0, 0.0]]))
