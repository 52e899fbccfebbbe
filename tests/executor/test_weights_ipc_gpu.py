"""Weights that a trainer's process hands over in the GPU's memory: two processes, and nothing is left behind."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.core.control import TakeTensors
from bough.core.errors import RequestError
from bough.executor.cuda_executor import CudaExecutor
from bough.rl import shared_tensors
from tests.executor.test_control_gpu import SHAPE, build
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.one_row import tokens_of

pytestmark = pytest.mark.gpu
TRAINER = Path(__file__).with_name("cuda_trainer.py")
QUERY = "model.layers.1.self_attn.q_proj.weight"
MODEL = "model.safetensors"


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    first, second = (write_checkpoint(tmp_path / str(seed), seed, torch.bfloat16, **SHAPE) for seed in (1, 2))
    return first, second


class Trainer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def say(self, line: str) -> str:
        """What it answers."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        assert answer, "the trainer has ended"
        return answer

    def update(self, executor: CudaExecutor, gather_below: int) -> str:
        path = self.say(str(gather_below))
        try:
            return executor.control(TakeTensors((path,))).wait().message
        finally:
            assert self.say("answered") == "gone" and not Path(path).exists()


@contextlib.contextmanager
def training(file: Path) -> Iterator[Trainer]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, str(TRAINER), str(file)], text=True, **pipes)
    try:
        yield Trainer(process)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("quantization", ["auto", "fp8"])
def test_a_trainers_tensors_take_effect_with_graphs(checkpoints: tuple[Path, Path], quantization: str) -> None:
    if quantization == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this device has no 8-bit products")
    executor, second = (build(folder, quantization) for folder in checkpoints)
    before, wanted = tokens_of(executor), tokens_of(second)
    assert before != wanted
    with training(checkpoints[1] / MODEL) as theirs, training(checkpoints[0] / MODEL) as ours:
        for gather_below in (0, 1 << 20, 1 << 40):  # a handle for each tensor, for some, and one for all
            assert "other values" in theirs.update(executor, gather_below)
            assert tokens_of(executor) == wanted
            ours.update(executor, gather_below)
            assert tokens_of(executor) == before
        assert ours.say("end") == theirs.say("end") == "0", "the trainers' memory is theirs again"
    executor.close()
    second.close()


def test_what_does_not_fit_changes_nothing_and_keeps_nothing(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    executor = build(checkpoints[0])
    before, tensors = tokens_of(executor), load_file(checkpoints[1] / MODEL)
    save_file({**tensors, QUERY: tensors[QUERY][:1].clone()}, tmp_path / "cut")
    with training(tmp_path / "cut") as trainer:
        for gather_below in (0, 1 << 40):
            with pytest.raises(RequestError, match=r"q_proj.weight has shape \[1, 512\], not"):
                trainer.update(executor, gather_below)
        path = trainer.say("0")
        handles = Path(path).read_bytes()
        assert trainer.say("nobody opens it") == "gone"
        assert trainer.say("end") == "0"
    (tmp_path / "late").write_bytes(handles)  # of a process that has ended
    with pytest.raises(RequestError, match="cannot be opened"):
        executor.control(TakeTensors((str(tmp_path / "late"),))).wait()
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    with shared_tensors(on_gpu) as path, pytest.raises(RequestError, match="cannot be opened"):
        executor.control(TakeTensors((path,))).wait()  # CUDA opens no handle in the process that made it
    assert tokens_of(executor) == before
    executor.close()
