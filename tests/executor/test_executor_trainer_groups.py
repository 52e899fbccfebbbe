"""Tensors that a trainer in another process sends to an executor's ranks: what fits takes effect, all else changes
nothing, and a trainer that is gone ends its group alone."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.core.control import WEIGHTS_GROUP, JoinTrainer, LeaveTrainer, ReceiveTensors
from bough.core.errors import RequestError
from bough.core.plan import Executor
from bough.core.settings import Settings
from bough.distributed.weights_group import WeightsGroup, open_store
from bough.executor.build import build_executor
from bough.loader.locate import locate
from tests.executor import trainer
from tests.executor.test_executor_ranks import LLAMA, alone, with_ranks
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.one_row import tokens_of

NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def training(file: Path, port: int, world_size: int = 2) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, str(Path(trainer.__file__)), str(port), str(world_size), str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def send(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    print("go", file=process.stdin, flush=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def receive(executor: Executor, tensors: Tensors, **other: Any) -> str:
    fields = {
        "names": tuple(tensors),
        "dtypes": tuple(str(tensor.dtype) for tensor in tensors.values()),
        "shapes": tuple(tuple(tensor.shape) for tensor in tensors.values()),
    }
    return executor.control(ReceiveTensors(**{**fields, **other})).wait().message


def join(executor: Executor, port: int, world_size: int = 2, **other: Any) -> str:
    fields = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world_size}
    return executor.control(JoinTrainer(**{**fields, **other})).wait().message


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    return write_checkpoint(tmp_path / "a", 1), write_checkpoint(tmp_path / "b", 2)


def make(folder: Path, **flat: Any) -> Executor:
    settings = {"device": "cpu", "cpu_threads": 1, "max_total_tokens": 256, "attention_backend": "torch", **flat}
    return build_executor(locate(str(folder)), Settings.from_flat(settings)).executor


def test_tensors_of_a_group_give_the_tokens_of_an_executor_that_began_with_them(
    checkpoints: tuple[Path, Path],
) -> None:
    executor, wanted, port = make(checkpoints[0]), make(checkpoints[1]), free_port()
    file = checkpoints[1] / "model.safetensors"
    tensors = load_file(file)
    before = tokens_of(executor)
    with training(file, port) as process:
        assert "ranks 1 to 1 of weight_update_group" in join(executor, port) and said(process) == "met"
        send(process)
        assert f"{len(tensors)} tensors" in receive(executor, tensors) and said(process) == "sent"
        assert tokens_of(executor) == tokens_of(wanted) != before
        executor.control(LeaveTrainer()).wait()
        with pytest.raises(RequestError, match="no group 'weight_update_group'"):
            receive(executor, tensors)
    executor.close()
    wanted.close()


def test_what_does_not_fit_changes_nothing_and_the_group_goes_on(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    executor, wanted, port = make(checkpoints[0]), make(checkpoints[1]), free_port()
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(checkpoints[1] / "model.safetensors").items()}
    save_file(tensors, tmp_path / "narrow")
    before = tokens_of(executor)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors.values())
    odd = tuple("model.nrm.weight" if name == NORM else name for name in tensors)
    integers = ("int16",) * len(tensors)
    flat = tuple((torch.Size(shape).numel(),) for shape in shapes)
    with training(tmp_path / "narrow", port) as process:
        join(executor, port)
        said(process)
        for reason, other in (
            ("no tensor 'model.nrm.weight'", {"names": odd}),
            ("is torch.int16; send one of torch.float32", {"dtypes": integers}),
            (r"has shape|fewer dimensions", {"shapes": flat}),
        ):
            send(process)
            with pytest.raises(RequestError, match=reason):
                receive(executor, tensors, **other)
            assert said(process) == "sent" and tokens_of(executor) == before
        for reason, other in (  # what cannot be read at all is refused before the trainer is heard
            ("of the same length", {"dtypes": integers[1:]}),
            ("each name another", {"names": (NORM,) * len(tensors)}),
            ("'Tensor' is no number format", {"dtypes": ("Tensor",) * len(tensors)}),
            ("shapes: ", {"shapes": ((-1,),) * len(tensors)}),
            ("no group 'other'", {"group_name": "other"}),
        ):
            with pytest.raises(RequestError, match=reason):
                receive(executor, tensors, **other)
        send(process)
        receive(executor, tensors)
        assert tokens_of(executor) != before
    executor.close()
    wanted.close()


def test_a_trainer_that_dies_ends_its_group_alone(checkpoints: tuple[Path, Path]) -> None:
    executor, port = make(checkpoints[0]), free_port()
    before, file = tokens_of(executor), checkpoints[1] / "model.safetensors"
    with training(file, port) as process:
        join(executor, port)
        said(process)
        process.kill()
        process.wait()
        with pytest.raises(RequestError, match=r"A tensor did not arrive: .*The old weights stay"):
            receive(executor, load_file(file))
        assert tokens_of(executor) == before
        with pytest.raises(RequestError, match="no group"):
            receive(executor, load_file(file))
    executor.close()


def test_a_trainer_that_never_comes_or_never_sends_is_not_waited_for(checkpoints: tuple[Path, Path]) -> None:
    executor = make(checkpoints[0], dist_timeout=8.0)
    before, tensors = tokens_of(executor), load_file(checkpoints[1] / "model.safetensors")
    with pytest.raises(RequestError, match=r"no group at 127.0.0.1:\d+ within 2 s: "):
        join(executor, free_port())
    store = open_store("127.0.0.1", 0, 3, 60.0, first=True)
    with pytest.raises(RequestError, match="Not all of the 3 ranks of weight_update_group have come"):
        join(executor, store.port, 3)
    store = open_store("127.0.0.1", 0, 2, 60.0, first=True)
    with ThreadPoolExecutor() as beside:
        silent = beside.submit(WeightsGroup, store, WEIGHTS_GROUP, 0, 2, "gloo", 60.0)
        join(executor, store.port)
        with pytest.raises(RequestError, match=r"did not arrive: .*The old weights stay"):
            receive(executor, tensors)
        silent.result().close()
    assert tokens_of(executor) == before
    executor.close()


def test_places_in_a_group_are_checked(checkpoints: tuple[Path, Path]) -> None:
    executor = make(checkpoints[0])
    for field, other in (
        ("rank_offset", {"rank_offset": 0}),
        ("rank_offset", {"rank_offset": 2}),
        ("backend", {"backend": "nccl"}),
    ):
        with pytest.raises(RequestError) as refused:
            join(executor, 1, **other)
        assert refused.value.field == field
    replicas = make(checkpoints[0], dp_size=2)
    with pytest.raises(RequestError, match="Replicas cannot share a group"):
        join(replicas, 1)
    for each in (executor, replicas):
        each.close()


def test_every_rank_takes_its_part_of_what_is_sent(tmp_path: Path) -> None:
    first, other = (write_checkpoint(tmp_path / name, seed, **LLAMA) for seed, name in enumerate("ab"))
    file, port = other / "model.safetensors", free_port()

    def use(executor: Executor) -> list[Any]:
        with training(file, port, world_size=3) as process:
            join(executor, port, world_size=3)
            said(process)
            send(process)
            with pytest.raises(RequestError, match="no tensor"):
                receive(executor, {f"{name}s": tensor for name, tensor in load_file(file).items()})
            found: list[Any] = [tokens_of(executor)]
            send(process)
            receive(executor, load_file(file))
            return [*found, tokens_of(executor)]

    assert with_ranks(first, 2, use) == [alone(first, tokens_of), alone(other, tokens_of)]
