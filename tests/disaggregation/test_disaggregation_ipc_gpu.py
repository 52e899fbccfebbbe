"""Pages that stay on a GPU between two processes: they arrive as they are, and the memory of an engine that dies is
free again. What any transport must do is in test_disaggregation_transports.py, with this one among them."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough import Engine
from bough.core.control import CopyPagesIn, CopyPagesOut
from bough.disaggregation.transports import Ring
from bough.distributed.cuda_ipc import PageMemory
from tests.disaggregation.test_disaggregation_transports import PATIENCE_S, Lender
from tests.executor.test_control_gpu import SHAPE, build
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.lender import RING_BYTES
from tests.fakes.one_row import PROMPT, go_on, tokens_of
from tests.fakes.page_exporter import export_pages
from tests.system.pairs import free_port

pytestmark = pytest.mark.gpu


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", 1, torch.bfloat16, **SHAPE)


class Exporter:
    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self.process = context.Process(target=export_pages, args=(other, folder), daemon=True)
        self.process.start()
        self.tokens: list[int] = self._receive()

    def lend(self, number: int) -> Any:
        self._connection.send(number)
        return self._receive()

    def _receive(self) -> Any:
        assert self._connection.poll(PATIENCE_S)
        return self._connection.recv()


@pytest.fixture
def exporter(folder: Path) -> Iterator[Exporter]:
    started = Exporter(folder)
    yield started
    started.process.kill()
    started.process.join()


@pytest.mark.parametrize("room", [64, 0], ids=["on the GPU", "by way of the host"])
def test_pages_of_one_process_arrive_equal_in_another(folder: Path, exporter: Exporter, room: int) -> None:
    executor = build(folder)
    assert tokens_of(executor) == exporter.tokens
    width = executor.limits().copied_bytes(0)
    ring = Ring(PageMemory(), max(1, room * len(PROMPT) * width))
    elsewhere = np.arange(100, 100 + len(PROMPT) + 16, dtype=np.int32)
    there = elsewhere[: len(PROMPT)].copy()
    for number in range(3):
        loan, content = exporter.lend(number)
        assert loan.on_gpu and content.any()
        payload: Any = ring.read(loan, content.nbytes).result(PATIENCE_S)
        assert isinstance(payload, torch.Tensor if room else np.ndarray)
        assert np.array_equal(torch.as_tensor(payload).cpu().numpy(), content.ravel())
        executor.control(CopyPagesIn(there, np.zeros_like(content))).wait()
        executor.control(CopyPagesIn(there, payload.reshape(content.shape))).wait()
        found = np.zeros_like(content)
        executor.control(CopyPagesOut(there, found)).wait()
        assert np.array_equal(found, content)
    assert go_on(executor, exporter.tokens[0], elsewhere, len(PROMPT), 5) == exporter.tokens[1:]
    executor.close()


def test_the_memory_of_an_engine_that_died_is_free_once_it_is_forgotten() -> None:
    reader = Ring(PageMemory(), 1 << 20)
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        lender = Lender("cuda_ipc")
        assert (reader.read(lender.lend(7, 1 << 19), 1 << 19).result(PATIENCE_S) == 7).all()
        lender.kill()
        reader.forget()
    deadline = time.monotonic() + PATIENCE_S
    while before - torch.cuda.mem_get_info()[0] > RING_BYTES // 2:
        assert time.monotonic() < deadline, "what was opened is still held"
        time.sleep(0.1)


@pytest.mark.parametrize("backend", ["cuda_ipc", "auto", "shm"])
def test_two_engines_on_one_gpu_answer_like_one(folder: Path, backend: str) -> None:
    port = free_port()
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_total_tokens": 8192,
        "chunked_prefill_size": 256,
        "disaggregation_bootstrap_port": port,
        "disaggregation_transfer_backend": backend,
    }
    home = {"disaggregation_mode": "decode", "prefill_url": "http://127.0.0.1:1"}
    greedy = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    draw = np.random.default_rng(0)
    prompts = [draw.integers(5, 8000, size=length).tolist() for length in (1000, 700, 40, 1500)]
    with (
        Engine(folder, **options, disaggregation_mode="prefill") as prefill,
        Engine(folder, **options, **home) as decode,
    ):
        paired = decode.generate(input_ids=prompts, sampling_params=greedy)
        state = decode.get_server_info()["internal_states"][0]
        assert state["transferred_bytes"] > 0
        alone = prefill.generate(input_ids=prompts, sampling_params=greedy)
    assert [each["output_ids"] for each in paired] == [each["output_ids"] for each in alone]
