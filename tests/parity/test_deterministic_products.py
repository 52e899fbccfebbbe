"""Deterministic inference on GPUs, by structure: no product is left to torch, whose libraries may choose another order
of sums for another number of rows. Triton's interpreter computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton")

from bough.core.settings import Settings
from bough.distributed.topology import Topology
from bough.executor.load_model import resolve_config
from bough.kernels.invariant_ops import INVARIANT
from bough.loader.load import load_weights, open_source
from bough.loader.locate import locate
from bough.models.registry import build_model
from tests.fakes.forward import CPU, Forward
from tests.parity.test_families import make

PRODUCTS = {"linear", "matmul", "__matmul__", "mm", "addmm", "bmm", "baddbmm", "einsum", "mv", "addmv", "tensordot"}


class Products(TorchFunctionMode):
    """Notes those that torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += [func.__name__] * (func.__name__ in PRODUCTS)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_next"])
def test_torch_computes_no_product(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared experts have a gate here."""
    theirs, files = make(family, tmp_path).theirs, locate(str(tmp_path))
    monkeypatch.setattr("bough.kernels.registry.ops_for", lambda device, deterministic: INVARIANT)
    config = resolve_config(files, Settings())
    assert config.moe is not None and config.moe.shared_gate
    model = build_model(config, Topology(), torch.float32, CPU, deterministic=True)
    load_weights(model.slots(), open_source(files, config), progress=False, device=CPU)
    forward, tokens = Forward(model), [5, 9, 2, 40, 7]
    with Products() as products:
        found = forward.step({0: tokens})[0]
    assert not products.seen
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
