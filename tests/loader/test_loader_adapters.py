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
from bough.core.settings import LoraSettings
from bough.distributed.topology import Topology
from bough.layers.adapters import Adapter, AdapterSlots
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
        ("target_parameters", ["mlp.experts.gate_up_proj"], "experts"),
        ("lora_bias", True, "lora_bias"),
        ("bias", "all", "bias 'all'"),
        ("layer_replication", [[0, 1]], "layer_replication"),
        ("trainable_token_indices", [3], "trainable_token_indices"),
        ("init_lora_weights", "pissa_niter_4", "init_lora_weights 'pissa_niter_4'"),
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
            "changes 'model.embed_tokens', which adapters cannot change here; .* on a CPU the embedding and the head",
        ),
        (
            {
                "base_model.model.lm_head.lora_A.weight": torch.zeros(4, 64),
                "base_model.model.lm_head.lora_B.weight": torch.zeros(128, 4),
            },
            "changes 'lm_head', which adapters cannot change",
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


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []}
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **sizes}
    folder = write_checkpoint(tmp_path / "base", 1, **moe)
    config, slots = read_config(locate(str(folder)), {}), AdapterSlots(1)
    list(build_model(config, Topology(), torch.float32, torch.device("meta"), adapters=slots).slots())
    attention = write_adapter(tmp_path / "attention", folder, 1, modules=("self_attn.q_proj",))
    assert len(read_adapter(str(attention), config, slots.shapes(), LoraSettings())[0]) == 2
    experts = write_adapter(tmp_path / "experts", folder, 1, modules=("up_proj",))
    with pytest.raises(ModelError, match=r"changes 'model.layers.0.mlp.experts.\d.up_proj', which adapters cannot"):
        read_adapter(str(experts), config, slots.shapes(), LoraSettings())


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


def test_alpha_may_differ_between_modules(base: Path, read: Read, tmp_path: Path) -> None:
    plain = read(write_adapter(tmp_path / "plain", base, 1))[0]
    own = read(write_adapter(tmp_path / "own", base, 1, alpha_pattern={"q_proj": 32, "layers.1.mlp.up_proj": 2}))[0]
    for name, matrices in own.items():
        times = 4.0 if name.endswith("q_proj") else 0.25 if name == "model.layers.1.mlp.up_proj" else 1.0
        torch.testing.assert_close(matrices[1], plain[name][1] * times)


def test_the_content_is_that_of_both_files(base: Path, read: Read, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, base, 1)
    first = read(folder)[1]
    assert read(folder)[1] == first
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 1}))
    assert read(folder)[1] != first
