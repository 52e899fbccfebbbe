"""Commands on a GPU: captured graphs outlive a swap of the weights, and are captured again after a release."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from bough.core.control import CopyPagesIn, CopyPagesOut, MemoryTag, Sleep, SwapWeights, Wake
from bough.core.errors import ModelError
from bough.core.settings import Settings
from bough.executor import cuda_copies, host_memory
from bough.executor.build import build_executor
from bough.executor.cuda_executor import CudaExecutor
from bough.loader.locate import locate
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.one_row import PROMPT, go_on, tokens_of

pytestmark = pytest.mark.gpu

# Large enough for the memory to be seen, and for 8-bit products.
SHAPE = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "intermediate_size": 2048, "vocab_size": 8192}
TOKENS = 65_536


def build(folder: Path, quantization: str = "auto", **more: bool) -> CudaExecutor:
    flat = {"max_total_tokens": TOKENS, "max_running_requests": 8, "chunked_prefill_size": 256, **more}
    executor = build_executor(locate(str(folder)), Settings.from_flat({**flat, "quantization": quantization})).executor
    assert isinstance(executor, CudaExecutor)
    while executor.idle():
        pass
    return executor


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    first, second = (write_checkpoint(tmp_path / str(seed), seed, torch.bfloat16, **SHAPE) for seed in (1, 2))
    return first, second


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_graphs_stay_valid_over_a_swap(checkpoints: tuple[Path, Path], quantization: str) -> None:
    if quantization == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device has no 8-bit products")
    first, second = (build(folder, quantization) for folder in checkpoints)
    before, wanted = tokens_of(first), tokens_of(second)
    assert before != wanted
    captured = [dict(graphs._graphs) for graphs in first._graphs]
    assert any(captured)
    for folder, expected in ((checkpoints[1], wanted), (checkpoints[0], before)):
        first.control(SwapWeights(str(folder))).wait()
        assert tokens_of(first) == expected
    with pytest.raises(ModelError):
        first.control(SwapWeights("/nowhere")).wait()
    assert tokens_of(first) == before
    assert [dict(graphs._graphs) for graphs in first._graphs] == captured
    first.close()
    second.close()


@pytest.mark.parametrize("tags", [("weights",), ("kv_cache",), ("weights", "kv_cache")])
def test_memory_is_released_and_comes_back(checkpoints: tuple[Path, Path], tags: tuple[MemoryTag, ...]) -> None:
    executor = build(checkpoints[0])
    before = tokens_of(executor)
    held = {
        "kv_cache": (TOKENS + 1) * executor.limits().page_bytes[0],
        "weights": sum(slot.nbytes for slot in executor._model.slots()),
    }
    allocated, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    assert all(tag in executor.control(Sleep(tags)).wait().obstacle for tag in tags)
    assert allocated - torch.cuda.memory_allocated() >= sum(held[tag] for tag in tags)
    assert torch.cuda.mem_get_info()[0] > free, "the device has it, not the allocator's cache"
    assert not executor.idle() and not any(graphs._graphs for graphs in executor._graphs)
    # An allocation in the meantime moves the addresses.
    taken = torch.empty(sum(held[tag] for tag in tags) // 2, dtype=torch.uint8, device="cuda")
    assert executor.control(Wake(tags)).wait().obstacle == ""
    del taken
    assert tokens_of(executor) == before, "kernel by kernel"
    while executor.idle():
        pass
    assert any(graphs._graphs for graphs in executor._graphs)
    assert tokens_of(executor) == before, "with graphs"
    executor.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_pages_copied_out_and_into_others_continue_alike(checkpoints: tuple[Path, Path], pinned: bool) -> None:
    executor = build(checkpoints[0])
    expected = tokens_of(executor)
    pages, elsewhere = np.arange(1, 1 + len(PROMPT), dtype=np.int32), np.arange(60, 40, -1, dtype=np.int32)
    shape = (len(PROMPT), executor.limits().page_bytes[0])
    buffer = torch.zeros(shape, dtype=torch.uint8, pin_memory=pinned).numpy()
    executor.control(CopyPagesOut(pages, buffer)).wait()
    ticket = executor.control(CopyPagesIn(elsewhere[: len(PROMPT)].copy(), buffer))
    assert go_on(executor, expected[0], elsewhere, len(PROMPT), 5) == expected[1:]
    ticket.wait()
    assert ticket.ready()
    executor.close()


@pytest.mark.parametrize("beside", [True, False])
def test_pages_copied_in_pieces_to_scattered_places_continue_alike(
    checkpoints: tuple[Path, Path], beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is waited for: the order of launches is that of the copies."""
    executor = build(checkpoints[0])
    page_bytes = executor.limits().page_bytes[0]
    for name in ("PIECE_BYTES", "RING_BYTES"):
        monkeypatch.setattr(cuda_copies, name, 3 * page_bytes)
    expected = tokens_of(executor)
    pages, elsewhere = np.arange(1, 1 + len(PROMPT), dtype=np.int32), np.arange(60, 40, -1, dtype=np.int32)
    slots = np.random.default_rng(0).permutation(np.arange(40, dtype=np.int32))[: len(PROMPT)]
    buffer = np.zeros((40, page_bytes), dtype=np.uint8)
    host_memory._pin([buffer])
    assert torch.from_numpy(buffer).is_pinned()
    out = executor.control(CopyPagesOut(pages, buffer, 0, slots, beside))
    ticket = executor.control(CopyPagesIn(elsewhere[: len(PROMPT)].copy(), buffer, 0, slots))
    assert go_on(executor, expected[0], elsewhere, len(PROMPT), 5) == expected[1:]
    out.wait()
    assert ticket.wait().seconds
    executor.close()


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("copies", [1, 3])
def test_layers_that_wait_for_their_pages_compute_the_same_bits(
    tmp_path: Path, parts: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step begins behind pages that are on their way, whole or layer by layer, by one copy or by several. The device
    is busy until all of it is queued."""
    count, layers = 8000, 8
    shape = {**SHAPE, "num_hidden_layers": layers, "max_position_embeddings": 8192}
    executor = build(write_checkpoint(tmp_path / "model", 1, torch.bfloat16, **shape), disable_cuda_graph=True)
    page_bytes, draw = executor.limits().page_bytes[0], np.random.default_rng(0)
    monkeypatch.setattr(cuda_copies, "PART_BYTES", 1)
    monkeypatch.setattr(cuda_copies, "PARTS", parts)
    monkeypatch.setattr(cuda_copies, "RING_BYTES", 100 * page_bytes)
    due, wait_for = list[int](), cuda_copies.PageCopies.wait_for

    def noted(self: cuda_copies.PageCopies, *layer: int) -> None:
        due.append(len(self._due))
        wait_for(self, *layer)

    monkeypatch.setattr(cuda_copies.PageCopies, "wait_for", noted)
    buffer = torch.randn(count, page_bytes // 2).bfloat16().view(torch.uint8).numpy()
    host_memory._pin([buffer])
    there, fresh = (first + draw.permutation(np.arange(count, dtype=np.int32)) for first in (1, 20_000))
    executor.control(CopyPagesIn(there, buffer)).wait()
    found, busy = [], torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for pages in (there, fresh):
        for _ in range(20):
            busy = busy @ busy
        for part in np.array_split(np.arange(count, dtype=np.int32), copies) if pages is fresh else ():
            executor.control(CopyPagesIn(fresh[part], buffer, 0, part))
        due.clear()
        tokens = go_on(executor, 7, np.concatenate([pages, np.arange(40_000, 40_008, dtype=np.int32)]), count, 1)
        computed = np.zeros((1, page_bytes), dtype=np.uint8)
        executor.control(CopyPagesOut(np.array([40_000], dtype=np.int32), computed)).wait()
        found.append((tokens, computed.tobytes()))
    assert found[0] == found[1]
    assert due[:layers] == [copies * max(0, parts - layer) for layer in range(layers)]
    executor.close()
