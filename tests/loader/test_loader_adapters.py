"""Adapters that cannot be used are refused, with what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.core.settings import LoraSettings
from bough.distributed.topology import Topology
from bough.layers.adapters import Adapter, AdapterSlots
from bough.loader import adapters
from bough.loader.adapters import read_adapter
from bough.loader.config import read_config
from bough.loader.locate import locate
from bough.models.registry import build_model
from tests.fakes.adapters import write_adapter
from tests.fakes.checkpoints import write_checkpoint

Read = Callable[..., tuple[Adapter, str]]
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("loader-adapters") / "base", 1)


@pytest.fixture(scope="module")
def read(base: Path) -> Read:
    config, slots = read_config(locate(str(base)), {}), AdapterSlots(1)
    list(build_model(config, Topology(), torch.float32, torch.device("meta"), adapters=slots).slots())

    def read(folder: Path, **settings: Any) -> tuple[Adapter, str]:
        return read_adapter(str(folder), config, slots.shapes(), LoraSettings(**settings))

    return read


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_dora", True, "DoRA"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("lora_bias", True, "lora_bias"),
        ("bias", "all", "bias 'all'"),
        ("layer_replication", [[0, 1]], "layer_replication"),
        ("trainable_token_indices", [3], "trainable_token_indices"),
        ("init_lora_weights", "pissa_niter_4", "init_lora_weights 'pissa_niter_4'"),
        ("init_lora_weights", "lora_ga", "init_lora_weights 'lora_ga'"),
        ("init_lora_weights", "OLoRA", "init_lora_weights 'OLoRA'"),
        ("use_bdlora", {"nblocks": 2}, "use_bdlora"),
        ("kasa_config", {"beta": 1e-4}, "kasa_config"),
        ("peft_type", "IA3", "only adapters of peft_type"),
        ("lora_alpha", "x", "lora_alpha must be a number"),
    ],
)
def test_configurations_that_ask_for_more(
    base: Path, read: Read, tmp_path: Path, field: str, value: object, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(write_adapter(tmp_path, base, 1, **{field: value}))


def changed(folder: Path, **changes: torch.Tensor | None) -> Path:
    """The adapter with other tensors; None takes one away."""
    file = folder / "adapter_model.safetensors"
    tensors: dict[str, torch.Tensor | None] = {**load_file(file), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{Q}.lora_A.weight": None}, "'model.layers.0.self_attn.q_proj' only lora_B"),
        (
            {f"{Q}.lora_A.weight": torch.zeros(4, 63)},
            r"B and A of .*q_proj' are \[64, 4\] and \[4, 63\], and the model has 64 x 64",
        ),
        ({f"{Q}.lora_B.weight": torch.zeros(60, 4)}, r"are \[60, 4\] and \[4, 64\]"),
        ({f"{Q}.lora_B.weight": torch.zeros(64, 5)}, r"are \[64, 5\] and \[4, 64\]"),
        ({f"{Q}.lora_magnitude_vector": torch.zeros(64)}, "lora_magnitude_vector' cannot be used"),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(4, 128)},
            "of 'model.embed_tokens' only lora_A is there",
        ),
        (
            {
                "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.lm_head.lora_B.weight": torch.zeros(127, 4),
            },
            r"B and A of 'lm_head' are \[127, 4\] and \[4, 64\], and the model has 128 x 64",
        ),
        (
            {
                "base_model.model.model.norm.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.model.norm.lora_B.weight": torch.zeros(64, 4),
            },
            "changes 'model.norm', which adapters cannot change here; linear layers, the embedding, the head and,",
        ),
        (
            {
                "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.model.layers.9.self_attn.q_proj.lora_B.weight": torch.zeros(64, 4),
            },
            "changes 'model.layers.9.self_attn.q_proj'",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    base: Path, read: Read, tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(changed(write_adapter(tmp_path, base, 1), **changes))


Moe = tuple[Path, ModelConfig, AdapterSlots]


@pytest.fixture
def moe(tmp_path: Path) -> Moe:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": []}
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **sizes}
    folder = write_checkpoint(tmp_path / "base", 1, **moe)
    return folder, read_config(locate(str(folder)), {}), AdapterSlots(1)


def named(config: ModelConfig, slots: AdapterSlots) -> dict[str, tuple[int, ...]]:
    list(build_model(config, Topology(), torch.float32, torch.device("meta"), adapters=slots).slots())
    return slots.shapes()


def test_experts_are_stacked_with_zeros_for_those_that_are_left_alone(moe: Moe, tmp_path: Path) -> None:
    base, config, slots = moe
    one = write_adapter(tmp_path / "a", base, 1, modules=("experts.2.up_proj",), lora_alpha=4)
    found = read_adapter(str(one), config, named(config, slots), LoraSettings())[0]
    assert list(found) == [f"model.layers.{layer}.mlp.experts.up_proj" for layer in range(2)]
    down, up = found["model.layers.1.mlp.experts.up_proj"]
    stored = load_file(one / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.experts.2.up_proj.lora_{}.weight"
    assert torch.equal(down[2], stored[name.format("A")]) and torch.equal(up[2], stored[name.format("B")])
    assert not down[[0, 1, 3]].any() and not up[[0, 1, 3]].any()


def test_parameters_of_experts_may_have_either_side_first(moe: Moe, tmp_path: Path) -> None:
    base, config, slots = moe
    folder = write_adapter(tmp_path / "a", base, 1, modules=(), fused=True)
    shapes = named(config, slots)
    straight = read_adapter(str(folder), config, shapes, LoraSettings())[0]
    file = folder / "adapter_model.safetensors"
    turned = {}
    for name, tensor in load_file(file).items():  # as PEFT has them that takes the first dimension for the inputs'
        if "lora_A" in name:
            turned[name.replace("lora_A", "lora_B")] = tensor.view(4, 4, -1).permute(2, 1, 0).reshape(-1, 16)
        else:
            turned[name.replace("lora_B", "lora_A")] = tensor.view(-1, 4, 4).permute(2, 1, 0).reshape(16, -1)
    save_file(turned, file)
    found = read_adapter(str(folder), config, shapes, LoraSettings())[0]
    assert set(found) == set(straight) and len(found) == 6
    for name, matrices in found.items():
        for own, expected in zip(matrices, straight[name], strict=True):
            torch.testing.assert_close(own, expected)


def test_what_of_experts_does_not_fit_is_refused(moe: Moe, tmp_path: Path) -> None:
    base, config, slots = moe
    shapes = named(config, slots)
    folder = write_adapter(tmp_path / "a", base, 1, modules=(), fused=True)
    with pytest.raises(ModelError, match="which --lora-target-modules does not name"):
        read_adapter(str(folder), config, shapes, LoraSettings(lora_target_modules="q_proj"))
    for targets in ("gate_up_proj down_proj", "gate_proj up_proj down_proj", "all"):
        read_adapter(str(folder), config, shapes, LoraSettings(lora_target_modules=targets))
    without = named(config, AdapterSlots(1, experts=False))
    with pytest.raises(ModelError, match=r"changes 'model.*experts.gate_up_proj', .* without --ep-size, experts"):
        read_adapter(str(folder), config, without, LoraSettings())
    a = "base_model.model.model.layers.0.mlp.experts.lora_A.weight"
    with pytest.raises(ModelError, match=r"are \[64, 16\] and \[15, 24\], and the model has 64 x 24"):
        read_adapter(str(changed(folder, **{a: torch.zeros(15, 24)})), config, shapes, LoraSettings())


def test_ranks_and_modules_beyond_what_is_allowed(base: Path, read: Read, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, base, 1, rank=8)
    every = '["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]'
    for targets in (every, "all", "q_proj,all"):
        assert len(read(folder, max_lora_rank=8, lora_target_modules=targets)[0]) == 14
    with pytest.raises(ModelError, match="has rank 8, and at most 4"):
        read(folder, max_lora_rank=4)
    with pytest.raises(ModelError, match=r"changes .*, which --lora-target-modules does not name"):
        read(folder, lora_target_modules="q_proj")


def test_folders_that_are_no_adapters(base: Path, read: Read, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"adapter_config.json is missing"):
        read(tmp_path)
    folder = write_adapter(tmp_path / "a", base, 1)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model.safetensors is missing"):
        read(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ModelError, match="damaged or cut short"):
        read(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        read(folder)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "~no-such-user/adapter"])
def test_names_that_no_folder_can_have(read: Read, name: str) -> None:
    with pytest.raises(ModelError, match=r"is no adapter: adapter_config.json is missing"):
        read(name)


def test_alpha_may_differ_between_modules(
    base: Path, read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = read(write_adapter(tmp_path / "plain", base, 1))[0]
    own = read(write_adapter(tmp_path / "own", base, 1, alpha_pattern={"q_proj": 32, "layers.1.mlp.up_proj": 2}))[0]
    for name, matrices in own.items():
        times = 4.0 if name.endswith("q_proj") else 0.25 if name == "model.layers.1.mlp.up_proj" else 1.0
        torch.testing.assert_close(matrices[1], plain[name][1] * times)
    with pytest.raises(TimeoutError):
        read(write_adapter(tmp_path / "endless", base, 1, alpha_pattern={r"(\w|\W|.)*[!?]": 32}))
    monkeypatch.setattr(adapters, "PATTERNS_S", 0.0)  # all of them together have taken too long
    with pytest.raises(TimeoutError):
        read(tmp_path / "own")


def test_the_content_is_that_of_both_files(base: Path, read: Read, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, base, 1)
    first = read(folder)[1]
    assert read(folder)[1] == first
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1}))
    assert read(folder)[1] != first
