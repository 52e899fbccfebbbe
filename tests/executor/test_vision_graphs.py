"""Vision towers whose blocks are graphs compute what their blocks do, for any number of patches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bough.executor import vision_graphs
from bough.executor.graphs import GraphMemory
from bough.executor.vision_graphs import VisionGraphs
from bough.loader import encoders
from tests.loader.test_loader_encoders import KINDS, load, one_by_one
from tests.multimodal.checkpoints import LANGUAGE, SEEING, TEXT, write_checkpoint

GRIDS = ([[1, 8, 12]], [[1, 16, 16]], [[1, 8, 12], [1, 4, 4], [2, 8, 6]], [[1, 4, 4]] * 9, [[1, 16, 36]])


class Computed:
    """Stands for a graph: computes again."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.replay, self.count = run, 0


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@torch.inference_mode()
def test_graphs_of_blocks_compute_what_blocks_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, device: str
) -> None:
    write_checkpoint(tmp_path, family, text={**TEXT, **LANGUAGE[family]}, vision=SEEING[family])
    modeling = sys.modules[getattr(transformers, KINDS[family]).__module__]
    monkeypatch.setattr(modeling, encoders.ROTATION, getattr(modeling, encoders.ROTATION))
    monkeypatch.setattr(vision_graphs, "SIZES", (128, 256, 512))
    model = load(tmp_path, family, device, torch.bfloat16)
    replays = list[int]()
    memory: Any = GraphMemory(1 << 20, torch.device(device)) if device == "cuda" else None
    if device == "cpu":
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", one_by_one)  # imported late: it is slow
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        transformers.AttentionInterface.register(encoders.PACKED, encoders.packed_attention)
        model.model.visual.config._attn_implementation = encoders.PACKED
    tower = model.model.visual
    width = tower.patch_embed.proj.weight[0].numel()
    pixels = [torch.randn(sum(t * h * w for t, h, w in grid), width).to(device, torch.bfloat16) for grid in GRIDS]
    grids = [torch.tensor(grid, device=device) for grid in GRIDS]

    def compute() -> list[tuple[torch.Tensor, ...]]:
        calls = [model.get_image_features(*given) for given in zip(pixels, grids, strict=True)]
        return [tuple(each.clone() for each in call.pooler_output) for call in calls]

    expected = compute()

    def capture(run: Callable[[], None]) -> Any:
        graph = memory.capture(run) if memory else Computed(run)
        replay = graph.replay
        graph.replay = lambda: (replays.append(1), replay())[1]
        return graph

    graphs = VisionGraphs(tower, capture).graphs
    blocks = len(tower.blocks)
    while graphs.capture_next():
        assert not replays
    for _ in range(2):
        for ours, theirs in zip(compute(), expected, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine, other, atol=2e-2, rtol=2e-2)
    # The last call but one has more images than a graph of its size has room for, the last one too many patches.
    whole = (
        sum(tower.config.fullatt_block_indexes.count(n) for n in range(blocks)) if family == "qwen2_5_vl" else blocks
    )
    assert len(replays) == 2 * (4 * (blocks - whole) + 3 * whole)
    assert float(expected[0][0].float().std()) > 0.01


def test_a_size_that_memory_does_not_hold_has_no_graph(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Tower(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch_embed, self.blocks = torch.nn.Module(), torch.nn.ModuleList()
            self.patch_embed.proj = torch.nn.Conv3d(3, 8, (2, 4, 4))

        def forward(self, pixels: torch.Tensor, grid: torch.Tensor) -> None:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    graphs = VisionGraphs(Tower(), lambda run: pytest.fail("nothing is captured")).graphs
    assert graphs.capture_next()
    assert "256 patches are computed without a graph" in caplog.text
