"""Models that cannot be served are found out before anything is loaded, and for the reason that matters."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from bough.core.errors import ModelError, SettingsError
from bough.core.settings import ModelSettings, Settings
from bough.launch.parts import adapter_paths, check_adapters, check_model, check_ranks, open_tokenizer
from bough.loader.locate import locate
from tests.conftest import TINY_LLAMA
from tests.fakes.checkpoints import write_checkpoint


def check(folder: Path, **settings: str) -> None:
    check_model(locate(str(folder)), ModelSettings(**settings))  # type: ignore[arg-type]


def test_a_whole_model_passes(tiny_model: Path, tmp_path: Path) -> None:
    check(tiny_model)
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    save_file({"x": np.zeros(4, dtype=np.float32)}, tmp_path / "model.safetensors")
    check(tmp_path)


def test_an_unknown_architecture_and_a_broken_configuration_are_named(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}')
    with pytest.raises(ModelError, match=r"NobodysForCausalLM.*LlamaForCausalLM"):
        check(tmp_path)
    config.write_text('{"architectures": [')
    with pytest.raises(ModelError, match=r"config\.json"):
        check(tmp_path)


def test_code_of_a_checkpoint_runs_only_for_an_unknown_tokenizer_and_with_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: ...\n")
    auto_map = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}
    (tmp_path / "config.json").write_text(json.dumps({**TINY_LLAMA, "auto_map": auto_map}))
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Own", null]}}')
    save_file({"x": np.zeros(4, dtype=np.float32)}, tmp_path / "model.safetensors")
    trusting = ModelSettings(trust_remote_code=True)
    check_model(locate(str(tmp_path)), trusting)
    with pytest.raises(ModelError, match="--trust-remote-code"):
        open_tokenizer(locate(str(tmp_path)), ModelSettings())
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ModelError, match="cannot be read"):  # the class is no tokenizer
        open_tokenizer(locate(str(tmp_path)), trusting)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_damaged_weights_are_named_unless_nobody_reads_them(tmp_path: Path, damage: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    weights = tmp_path / "model.safetensors"
    save_file({"x": np.zeros(400, dtype=np.float32)}, weights)
    weights.write_bytes(weights.read_bytes()[:-100] if damage == "cut" else b"\xff" * 500)
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        check(tmp_path)
    check(tmp_path, load_format="dummy")


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_overrides_must_be_an_object(tiny_model: Path, text: str) -> None:
    with pytest.raises(SettingsError, match="json-model-override-args"):
        check(tiny_model, json_model_override_args=text)


def test_checking_needs_no_torch() -> None:
    code = "import sys, bough.launch.parts, bough.launch.engine; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_ranks_that_the_model_has_no_parts_for_are_refused_at_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, 3)
    files = locate(str(tmp_path))
    check_ranks(files, Settings.from_flat({"tp_size": 2, "pp_size": 2}))
    with pytest.raises(SettingsError, match="--pp-size 100"):
        check_ranks(files, Settings.from_flat({"pp_size": 100}))
    for size in (3, 100):
        with pytest.raises(SettingsError, match=rf"--tp-size {size}: num_heads \(4\) .* fit this model: 1, 2, 4\."):
            check_ranks(files, Settings.from_flat({"tp_size": size}))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (None, []),
        ("sql=/a/sql", [("sql", "/a/sql", False)]),
        ("/a/sql", [("/a/sql", "/a/sql", False)]),
        ("sql=/runs/lr=1e-4/last", [("sql", "/runs/lr=1e-4/last", False)]),
        ("/runs/lr=1e-4/last", [("/runs/lr=1e-4/last", "/runs/lr=1e-4/last", False)]),
        ('{"lora_name": "sql", "lora_path": "/a", "pinned": true}', [("sql", "/a", True)]),
        ('["x=/a", {"lora_name": "y", "lora_path": "/b"}]', [("x", "/a", False), ("y", "/b", False)]),
    ],
)
def test_paths_of_adapters(given: str | None, found: list[tuple[str, str, bool]]) -> None:
    assert adapter_paths(given) == found


@pytest.mark.parametrize(
    "given",
    [
        [{"lora_name": "x", "lora_path": "/a"}],
        [{"lora_name": "x", "lora_path": Path("/a")}],
        {"x": "/a"},
        {"x": Path("/a")},
        ["x=/a"],
        "x=/a",
    ],
)
def test_engines_take_adapters_as_objects_or_words(given: Any) -> None:
    settings = Settings.from_flat({"lora_paths": given, "enable_lora": True})
    assert adapter_paths(settings.lora.lora_paths) == [("x", "/a", False)]
    settings = Settings.from_flat({"lora_paths": {"x": "/a", "y": "/b"}, "enable_lora": True})
    assert adapter_paths(settings.lora.lora_paths) == [("x", "/a", False), ("y", "/b", False)]


@pytest.mark.parametrize("given", ['{"lora_name": "x"}', "[3]", "[", '{"x"'])
def test_paths_of_adapters_that_cannot_be_read(given: str) -> None:
    with pytest.raises(SettingsError, match=r"--lora-paths: .* is not NAME=PATH"):
        adapter_paths(given)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"lora_paths": "x=/a"}, "needs --enable-lora"),
        ({"lora_resolver": "."}, "--lora-resolver needs --enable-lora"),
        ({"lora_resolver": "absent", "enable_lora": True}, "absent is no folder"),
        ({"enable_lora": True, "tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, "--enable-dp-attention"),
        ({"enable_lora": True, "simulate_tp": 2}, "--simulate-tp"),
    ],
)
def test_adapters_that_cannot_be_had(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        check_adapters(Settings.from_flat(flags))
    check_adapters(
        Settings.from_flat(
            {"enable_lora": True, "lora_paths": ["x=/a", "y=/b"], "dp_size": 2, "tp_size": 2, "pp_size": 2}
        )
    )
