"""Tensors that are handed to executors while they run: what fits takes effect, what does not changes nothing."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.core.control import ReadWeight, Sleep, TakeTensors, Wake
from bough.core.errors import ModelError, RequestError
from bough.core.plan import Executor
from bough.core.settings import Settings
from bough.distributed.cuda_ipc import shared_handles
from bough.executor.build import build_executor
from bough.loader.locate import locate
from bough.native.library import load_library
from bough.rl import shared_tensors
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.cuda_ipc import FakeIpc
from tests.fakes.one_row import tokens_of

Make = Callable[..., Executor]
QUERY, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"


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


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def take(executor: Executor, *files: Path) -> str:
    return executor.control(TakeTensors(tuple(map(str, files)))).wait().message


def written(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, path)
    return path


def rows_of(executor: Executor, name: str, rows: int = 100) -> torch.Tensor:
    return torch.tensor(msgspec.json.decode(executor.control(ReadWeight(name, rows)).wait().message))


def test_tensors_give_the_tokens_of_an_executor_that_began_with_them(
    make: Make, checkpoints: tuple[Path, Path]
) -> None:
    executor, second = make(checkpoints[0]), make(checkpoints[1])
    before, wanted = tokens_of(executor), tokens_of(second)
    for folder, expected in ((checkpoints[1], wanted), (checkpoints[0], before), (checkpoints[1], wanted)):
        take(executor, folder / "model.safetensors")
        assert tokens_of(executor) == expected
        for name, tensor in tensors_of(folder).items():
            assert torch.equal(rows_of(executor, name, 10**6), tensor), name
    executor.close()
    second.close()


def test_a_part_of_the_tensors_changes_alone(make: Make, checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    ours, theirs = (tensors_of(folder) for folder in checkpoints)
    mixed = Path(shutil.copytree(checkpoints[0], tmp_path / "mixed"))
    written(mixed / "model.safetensors", {**ours, QUERY: theirs[QUERY], NORM: theirs[NORM]})
    executor, wanted = make(checkpoints[0]), make(mixed)
    files = [written(tmp_path / name, {name: theirs[name]}) for name in (QUERY, NORM)]
    assert "2 tensors" in take(executor, *files)
    assert tokens_of(executor) == tokens_of(wanted)
    assert torch.equal(rows_of(executor, QUERY, 3), theirs[QUERY][:3])
    executor.close()
    wanted.close()


def test_other_numbers_are_converted(make: Make, checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    narrow = {name: tensor.bfloat16() for name, tensor in tensors_of(checkpoints[1]).items()}
    executor = make(checkpoints[0])
    take(executor, written(tmp_path / "narrow", narrow))
    assert torch.equal(rows_of(executor, QUERY), narrow[QUERY].float())
    executor.close()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_engines_quantise_what_they_take(
    make: Make, checkpoints: tuple[Path, Path], quantization: str, request: pytest.FixtureRequest
) -> None:
    if "torch" in request.node.name:
        pytest.skip("the native kernels quantise")
    executor, wanted = (make(folder, quantization=quantization) for folder in checkpoints)
    take(executor, checkpoints[1] / "model.safetensors")
    assert tokens_of(executor) == tokens_of(wanted)
    executor.close()
    wanted.close()


def test_a_tied_models_head_is_its_embedding(make: Make, tmp_path: Path) -> None:
    first, second = (
        write_checkpoint(tmp_path / name, seed, tie_word_embeddings=True) for seed, name in enumerate("ab")
    )
    executor, wanted = make(first), make(second)
    tensors = tensors_of(second)
    table = tensors["model.embed_tokens.weight"]
    take(executor, written(tmp_path / "all", {**tensors, "lm_head.weight": table.clone()}))
    assert tokens_of(executor) == tokens_of(wanted)
    assert torch.equal(rows_of(executor, "lm_head.weight", 5), table[:5])
    with pytest.raises(RequestError, match=r"lm_head.weight is model.embed_tokens.weight"):
        take(executor, written(tmp_path / "head", {"lm_head.weight": table}))
    executor.close()
    wanted.close()


def test_what_does_not_fit_changes_nothing(
    make: Make, checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make(checkpoints[0])
    before, theirs = tokens_of(executor), tensors_of(checkpoints[1])

    def refused(reason: str, *files: Path) -> None:
        with pytest.raises(RequestError, match=reason):
            take(executor, *files)
        assert tokens_of(executor) == before

    good = written(tmp_path / "good", {NORM: theirs[NORM]})
    bad = tmp_path / "bad"
    refused("no tensor 'model.nrm.weight'", good, written(bad, {"model.nrm.weight": theirs[NORM]}))
    refused(r"q_proj.weight has shape \[1, 64\], not", written(bad, {**theirs, QUERY: theirs[QUERY][:1]}))
    refused(r"has shape \[1\]", written(bad, {**theirs, QUERY: torch.tensor(1.0)}))
    refused("is torch.int8; send one of torch.float32", written(bad, {**theirs, QUERY: theirs[QUERY].to(torch.int8)}))
    refused("no tensor to update", written(bad, {}))
    whole = (checkpoints[1] / "model.safetensors").read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    refused("no whole safetensors", good, bad)
    bad.write_bytes(pickle.dumps({NORM: [1.0]}))
    refused("no whole safetensors", bad)
    refused("cannot be read", good, tmp_path / "nowhere")
    refused("cannot be read", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    refused("not a file of the user", good)
    executor.close()


def test_handles_of_a_gpus_memory_are_read_and_let_go(
    make: Make, checkpoints: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ipc, executor, wanted = FakeIpc(monkeypatch), make(checkpoints[0]), make(checkpoints[1])
    before, tensors = tokens_of(executor), tensors_of(checkpoints[1])
    file = tmp_path / "handles"
    with shared_handles({**tensors, QUERY: tensors[QUERY][:1]}, 4096) as content:
        file.write_bytes(content)
        with pytest.raises(RequestError, match=r"q_proj.weight has shape \[1, 64\], not") as raised:
            take(executor, file)
        assert ipc.opened and ipc.all_closed(), raised
    assert tokens_of(executor) == before
    with shared_handles(tensors, 4096) as content:
        file.write_bytes(content)
        take(executor, file)
        assert ipc.all_closed()
    assert tokens_of(executor) == tokens_of(wanted)
    executor.close()
    wanted.close()


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files of memory alone are Linux's")
def test_memory_files_have_paths_too(make: Make, checkpoints: tuple[Path, Path]) -> None:
    executor, wanted = make(checkpoints[0]), make(checkpoints[1])
    number = os.memfd_create("weights")
    os.write(number, (checkpoints[1] / "model.safetensors").read_bytes())
    take(executor, Path(f"/proc/{os.getpid()}/fd/{number}"))
    os.close(number)
    assert tokens_of(executor) == tokens_of(wanted)
    executor.close()
    wanted.close()


def test_released_weights_come_back_from_their_files_and_say_so(make: Make, checkpoints: tuple[Path, Path]) -> None:
    executor = make(checkpoints[0])
    before = tokens_of(executor)
    take(executor, checkpoints[1] / "model.safetensors")
    executor.control(Sleep(("weights",))).wait()
    for command in (TakeTensors((str(checkpoints[1] / "model.safetensors"),)), ReadWeight(NORM)):
        with pytest.raises(RequestError, match="weights are released"):
            executor.control(command).wait()
    woken = executor.control(Wake()).wait()
    assert "send the tensors" in woken.message and woken.lost
    assert tokens_of(executor) == before
    executor.control(Sleep()).wait()
    woken = executor.control(Wake()).wait()
    assert "send the tensors" not in woken.message and not woken.lost
    executor.close()


def test_files_with_a_bias_that_the_model_has_not_are_not_read_again(
    make: Make, checkpoints: tuple[Path, Path]
) -> None:
    executor, folder = make(checkpoints[0]), checkpoints[0]
    executor.control(Sleep(("weights",))).wait()
    sound = tensors_of(folder)
    written(folder / "model.safetensors", {**sound, QUERY.replace("weight", "bias"): torch.ones(len(sound[QUERY]))})
    with pytest.raises(ModelError, match=r"q_proj\.bias has no place in this model"):
        executor.control(Wake()).wait()
    executor.close()


def test_tensors_that_hold_several_of_the_models_are_cut(make: Make, tmp_path: Path) -> None:
    """Phi-3 has queries, keys and values in one tensor, and gates with what they gate."""
    shape = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    first, second = (write_checkpoint(tmp_path / name, seed) for seed, name in enumerate("ab"))
    plain = tensors_of(second)
    fused = {name: tensor for name, tensor in plain.items() if "q_proj" not in name}
    for layer in (name.removesuffix("self_attn.q_proj.weight") for name in plain if "q_proj" in name):
        parts = [fused.pop(f"{layer}self_attn.{part}_proj.weight") for part in "kv"]
        fused[f"{layer}self_attn.qkv_proj.weight"] = torch.cat([plain[f"{layer}self_attn.q_proj.weight"], *parts])
        fused[f"{layer}mlp.gate_up_proj.weight"] = torch.cat(
            [fused.pop(f"{layer}mlp.{part}_proj.weight") for part in ("gate", "up")]
        )
    for folder in (first, second):
        config = msgspec.json.decode((folder / "config.json").read_bytes())
        (folder / "config.json").write_bytes(msgspec.json.encode({**config, **shape}))
        random = {name: torch.randn_like(tensor) * 0.1 for name, tensor in fused.items()}
        written(folder / "model.safetensors", fused if folder == second else random)
    executor, wanted = make(first), make(second)
    take(executor, second / "model.safetensors")
    assert tokens_of(executor) == tokens_of(wanted)
    with pytest.raises(RequestError, match="kept in parts"):
        rows_of(executor, "model.layers.0.self_attn.qkv_proj.weight")
    executor.close()
    wanted.close()


@pytest.mark.parametrize(
    "family", ["Qwen3Moe", "Mixtral", "DeepseekV3", "GraniteMoe", "Phimoe", "MiniMaxM2", "Ernie4_5_Moe"]
)
def test_a_trainers_modules_have_the_experts_of_a_layer_in_one_tensor(make: Make, tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
        "num_key_value_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_group": 1,
        "topk_group": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "first_k_dense_replace": 1, "q_lora_rank": None,
    }  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**sizes)
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        trainer = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for weight in (each for each in trainer.parameters() if each.dim() > 1):
            weight.data.normal_(0, 0.2)
        trainer.save_pretrained(tmp_path / name)
    tensors = trainer.state_dict()
    assert any(name.endswith(".experts.gate_up_proj") for name in tensors)
    executor, wanted = make(tmp_path / "first"), make(tmp_path / "second")
    assert tokens_of(executor) != tokens_of(wanted)
    with shared_tensors(tensors) as path:
        take(executor, Path(path))
    assert tokens_of(executor) == tokens_of(wanted)
    executor.close()
    wanted.close()
