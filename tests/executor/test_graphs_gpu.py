"""Graphs that are captured while the cache is in use, and in executors of unusual sizes."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.executor.cuda_executor import CudaExecutor
from bough.executor.graphs import USES_BEFORE_CAPTURE, Captured
from bough.executor.plain_plans import decode_plan, prompt_plan
from bough.kernels.projected_decode import triton as projected
from bough.loader.locate import locate
from tests.conftest import TINY_LLAMA

pytestmark = pytest.mark.gpu

SHAPE = {
    **TINY_LLAMA,
    "hidden_size": 128,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def build(folder: Path, vocab_size: int = 1000, **settings: Any) -> CudaExecutor:
    (folder / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": vocab_size}))
    flat = {"load_format": "dummy", "max_total_tokens": 4096, **settings}
    executor = build_executor(locate(str(folder)), Settings.from_flat(flat)).executor
    assert isinstance(executor, CudaExecutor)
    return executor


@pytest.mark.parametrize("tokens", [60, 200, 250])
def test_what_is_captured_later_leaves_the_cache_alone(tmp_path: Path, tokens: int) -> None:
    """A large graph is captured under load, and smaller ones when nothing runs."""
    executor = build(tmp_path, max_running_requests=8, chunked_prefill_size=256)
    pages = np.arange(1, 1 + tokens, dtype=np.int32)
    plan = prompt_plan(0, np.arange(tokens, dtype=np.int32), pages)
    first = [executor.launch(plan).wait().tokens.tolist() for _ in range(USES_BEFORE_CAPTURE + 1)]
    assert executor.idle(busy=True) and not executor.idle(busy=True)
    layers = [*executor._pool.keys, *executor._pool.values]
    before = [layer[pages].clone() for layer in layers]
    while executor.idle():
        pass
    assert all(torch.equal(layer[pages], kept) for layer, kept in zip(layers, before, strict=True))
    assert executor.launch(plan).wait().tokens.tolist() == first[-1]
    executor.close()


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_few_keys_have_graphs_of_their_own_that_compute_the_same(tmp_path: Path, rows: int) -> None:
    """Captured, padded to the next size where there is none, and kernel by kernel."""
    sizes = {"max_running_requests": 16, "chunked_prefill_size": 512, "max_total_tokens": 8192}
    executor = build(tmp_path, dtype="bfloat16", **sizes)
    for row in range(rows):
        length = 20 + 60 * row
        pages = np.arange(1, length + 9, dtype=np.int32) + 600 * row
        executor.launch(prompt_plan(row, np.arange(length, dtype=np.int32) + row, pages)).wait()
    size = next(size for size in (1, 4, 8) if size >= rows)
    with torch.inference_mode():
        graphs = [executor._capture_decode(size, few_keys=few) for few in (False, True)]
        for step in range(8):
            executor._staging.next_step()
            plan = decode_plan(step, rows)
            executor._inputs.send_decode(plan, executor._inputs.apply(plan), size)
            logits_of = executor._model.logits
            apart, together = (logits_of(graph.forward.replay()[:rows]).double() for graph in graphs)
            alone = logits_of(executor._decode_hidden(rows, few_keys=True)).double()
            for logits in (together, alone):
                assert float((logits - apart).norm() / apart.norm()) < 2e-2
            executor._sample_decodes(rows, apart.bfloat16())  # so that the next step begins with other tokens
    executor.close()


def test_decodes_take_the_graphs_that_fit_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected, "MOST_KEYS", 100)
    executor = build(tmp_path, dtype="bfloat16", max_running_requests=8)
    while executor.idle():
        pass
    kinds = executor._few_keys_graphs, executor._decode_graphs
    taken = []
    for length in (99, 100):  # and the token that is computed
        executor.launch(prompt_plan(0, np.zeros(length, dtype=np.int32), np.arange(1, 120, dtype=np.int32))).wait()
        before = [graphs._uses[1] for graphs in kinds]
        executor.launch(decode_plan(0, 1)).wait()
        taken.append([graphs._uses[1] - used for graphs, used in zip(kinds, before, strict=True)])
    assert taken == [[1, 0], [0, 1]]
    executor.close()


@pytest.mark.parametrize(("rows", "chunk"), [(1, 16), (8, 16), (2, 29), (4, 1)])
def test_small_executors_come_to_rest(tmp_path: Path, rows: int, chunk: int) -> None:
    executor = build(tmp_path, max_running_requests=rows, chunked_prefill_size=chunk)
    while executor.idle():
        pass
    executor.launch(prompt_plan(0, np.arange(chunk, dtype=np.int32), np.arange(1, 1 + chunk, dtype=np.int32))).wait()
    executor.close()


def test_graphs_compute_in_one_block(tmp_path: Path) -> None:
    """Captured smallest first, they take no more than the block of the largest. Small tensors have blocks of 2 MiB."""
    executor = build(tmp_path, 100_000, dtype="bfloat16", max_running_requests=256, chunked_prefill_size=512)
    scratch, before = executor._graph_memory._scratch_bytes, pool_bytes()
    with torch.inference_mode():
        graphs = [executor._capture_decode(size, few_keys=False) for size in (1, 2, 4, 8, 64, 128, 192, 256)]
    taken = pool_bytes() - before
    executor.close()
    assert len(graphs) == 8 and scratch >= 256 * 100_000 * 2
    assert scratch <= taken <= scratch + (16 << 20)


def pool_bytes() -> int:
    """What the pools of graphs hold."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


def test_garbage_is_left_alone_during_a_capture() -> None:
    """What it frees may be a graph or pinned memory, and a call of the driver then ends the capture."""
    collections, kept = list[str](), torch.zeros(1, device="cuda")

    def run() -> torch.Tensor:
        for _ in range(100_000):  # of which a few hundred would set off a collection
            cycle: list[object] = []
            cycle.append(cycle)
        return kept.add_(1)

    gc.callbacks.append(told := lambda phase, _: collections.append(phase))
    try:
        captured = Captured(run, torch.cuda.graph_pool_handle())
    finally:
        gc.callbacks.remove(told)
    assert not collections and gc.isenabled()
    captured.replay()
    assert kept.item() == 1
