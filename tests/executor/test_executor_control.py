"""Commands on real executors: pages that move, weights that are swapped, memory that is given back."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.core.control import CopyPagesIn, CopyPagesOut, MemoryTag, Sleep, SwapWeights, Wake
from bough.core.errors import BoughError, ModelError, RequestError
from bough.core.plan import Executor
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.loader.locate import locate
from bough.native.library import load_library
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.one_row import PROMPT, go_on, tokens_of

Make = Callable[..., Executor]


@pytest.fixture
def checkpoints(tmp_path: Path) -> tuple[Path, Path]:
    return write_checkpoint(tmp_path / "a", 1), write_checkpoint(tmp_path / "b", 2)


@pytest.fixture(params=["native", "torch"])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    if request.param == "native" and load_library() is None:
        pytest.skip("the CPU kernels are not compiled")
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path / "home"))

    def build(folder: Path, **flat: Any) -> Executor:
        settings = {"device": "cpu", "cpu_threads": 1, "max_total_tokens": 256, "attention_backend": request.param}
        return build_executor(locate(str(folder)), Settings.from_flat({**settings, **flat})).executor

    return build


@pytest.mark.parametrize(("page_size", "dtype"), [(1, "auto"), (4, "bf16")])
def test_pages_copied_out_and_into_others_continue_alike(
    make: Make, checkpoints: tuple[Path, Path], page_size: int, dtype: str
) -> None:
    executor = make(checkpoints[0], page_size=page_size, kv_cache_dtype=dtype)
    expected = tokens_of(executor)
    used = -(-len(PROMPT) // page_size)
    pages, room = np.arange(1, 1 + used, dtype=np.int32), 16 // page_size
    buffer = np.zeros((used, executor.limits().page_bytes[0]), dtype=np.uint8)
    out = executor.control(CopyPagesOut(pages, buffer))
    elsewhere = np.arange(40 + room, 40, -1, dtype=np.int32)
    ticket = executor.control(CopyPagesIn(elsewhere[:used].copy(), buffer))
    # Ordered with the plans: this one is launched before either copy is looked at.
    assert go_on(executor, expected[0], elsewhere, len(PROMPT), 5) == expected[1:]
    assert out.ready() and ticket.ready() and buffer.any()
    executor.control(CopyPagesIn(elsewhere[:used].copy(), np.zeros_like(buffer)))
    assert go_on(executor, expected[0], elsewhere, len(PROMPT), 5) != expected[1:]
    executor.close()


@pytest.mark.parametrize("quantization", ["auto", "none", "int8", "int4"])
def test_swapped_weights_give_the_tokens_of_an_executor_that_began_with_them(
    make: Make, checkpoints: tuple[Path, Path], quantization: str, request: pytest.FixtureRequest
) -> None:
    if "torch" in request.node.name and quantization.startswith("int"):
        pytest.skip("the native kernels quantise")
    first, second = (make(folder, quantization=quantization) for folder in checkpoints)
    before, wanted = tokens_of(first), tokens_of(second)
    assert before != wanted
    packed = sorted(Path(checkpoints[0].parent / "home").rglob("*.bin"))
    for folder, expected in ((checkpoints[1], wanted), (checkpoints[0], before), (checkpoints[1], wanted)):
        assert first.control(SwapWeights(str(folder))).wait().obstacle == ""
        assert tokens_of(first) == expected
    assert sorted(Path(checkpoints[0].parent / "home").rglob("*.bin")) == packed
    first.close()
    second.close()


def test_a_checkpoint_in_other_numbers_may_follow(make: Make, checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    narrow = write_checkpoint(tmp_path / "narrow", 2, torch.bfloat16)
    executor, wanted = make(checkpoints[0]), make(narrow)
    executor.control(SwapWeights(str(narrow), "safetensors")).wait()
    assert tokens_of(executor) == tokens_of(wanted)
    executor.close()
    wanted.close()


def test_random_weights_are_a_format_like_others(make: Make, checkpoints: tuple[Path, Path]) -> None:
    executor, dummy = make(checkpoints[0]), make(checkpoints[0], load_format="dummy")
    executor.control(SwapWeights(str(checkpoints[0]), "dummy")).wait()
    assert tokens_of(executor) == tokens_of(dummy)
    dummy.control(SwapWeights(str(checkpoints[1]))).wait()
    executor.control(SwapWeights(str(checkpoints[1]))).wait()
    assert tokens_of(executor) == tokens_of(dummy)
    executor.close()
    dummy.close()


def test_a_checkpoint_that_does_not_fit_changes_nothing(
    make: Make, checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    executor = make(checkpoints[0])
    before = tokens_of(executor)

    def refused(path: Path | str, text: str, load_format: str | None = None, error: type = ModelError) -> None:
        with pytest.raises(error, match=text) as found:
            executor.control(SwapWeights(str(path), load_format)).wait()
        assert isinstance(found.value, BoughError)
        assert tokens_of(executor) == before

    refused(tmp_path / "nowhere", "Unknown model")
    refused("a\0b", "Unknown model|cannot be read")
    refused(checkpoints[1], "load_format must be one of", "pickle", RequestError)
    refused("", "model_path is empty", None, RequestError)
    refused(checkpoints[1], "holds no gguf weights", "gguf")
    refused(write_checkpoint(tmp_path / "wide", 3, intermediate_size=96), "its intermediate_size is 96")
    refused(write_checkpoint(tmp_path / "turned", 3, rope_theta=5000.0), "its rope is")
    lacking, shifted, cut = (Path(shutil.copytree(checkpoints[1], tmp_path / name)) for name in ("x", "y", "z"))
    tensors = load_file(checkpoints[1] / "model.safetensors")
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, lacking / "model.safetensors")
    refused(lacking, "lacks 1 of the")
    save_file({**tensors, "model.norm.weight": norm[:-1].clone()}, shifted / "model.safetensors")
    refused(shifted, "Tensor model.norm.weight has shape")
    whole = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    refused(cut, "damaged or cut short")
    executor.close()


@pytest.mark.parametrize("tags", [("weights",), ("kv_cache",), ("weights", "kv_cache")])
def test_released_memory_comes_back_with_the_same_tokens(
    make: Make, checkpoints: tuple[Path, Path], tags: tuple[MemoryTag, ...]
) -> None:
    executor = make(checkpoints[0])
    before = tokens_of(executor)
    for _ in range(2):  # the second time there is nothing to do
        asleep = executor.control(Sleep(tags)).wait()
        assert all(tag in asleep.obstacle for tag in tags)
    assert [held_bytes(executor, tag) > 0 for tag in ("weights", "kv_cache")] == [
        tag not in tags for tag in ("weights", "kv_cache")
    ]
    for _ in range(2):
        assert executor.control(Wake()).wait().obstacle == ""
    assert tokens_of(executor) == before
    executor.control(SwapWeights(str(checkpoints[1]))).wait()
    swapped = tokens_of(executor)
    executor.control(Sleep(tags)).wait()
    executor.control(Wake(tags)).wait()
    assert tokens_of(executor) == swapped != before, "the weights are those that were there last"
    executor.close()


def held_bytes(executor: Any, tag: str) -> int:
    control = executor._inner._control
    if tag == "kv_cache":
        return sum(tensor.untyped_storage().nbytes() for tensor in (*control._pool.keys, *control._pool.values))
    slots = control._weights._slots
    plain = sum(slot.target.untyped_storage().nbytes() for slot in slots if slot.packing is None)
    return plain + sum(slot.packing._weight is not None for slot in slots if slot.packing is not None)


def test_weights_are_swapped_between_the_wakings(make: Make, checkpoints: tuple[Path, Path]) -> None:
    """As trainers do: weights back, swap, then the cache."""
    executor, wanted = make(checkpoints[0]), make(checkpoints[1])
    executor.control(Sleep()).wait()
    with pytest.raises(RequestError, match="weights are released"):
        executor.control(SwapWeights(str(checkpoints[1]))).wait()
    assert "kv_cache" in executor.control(Wake(("weights",))).wait().obstacle
    assert executor.control(SwapWeights(str(checkpoints[1]))).wait().obstacle
    assert executor.control(Wake(("kv_cache",))).wait().obstacle == ""
    assert tokens_of(executor) == tokens_of(wanted)
    executor.close()
    wanted.close()


def test_weights_whose_files_have_gone_stay_released(make: Make, checkpoints: tuple[Path, Path]) -> None:
    executor = make(checkpoints[0])
    before = tokens_of(executor)
    executor.control(Sleep()).wait()
    file, aside = checkpoints[0] / "model.safetensors", checkpoints[0].parent / "aside"
    file.rename(aside)
    with pytest.raises(BoughError, match="cannot be read"):
        executor.control(Wake()).wait()
    aside.rename(file)
    assert executor.control(Wake()).wait().obstacle == ""
    assert tokens_of(executor) == before
    executor.close()
