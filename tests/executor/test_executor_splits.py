"""Which splits of public shapes fit on which GPUs, and which is recommended."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.cli.commands import Parser
from bough.cli.flags import add_engine_flags, given_settings
from bough.cli.main import main
from bough.core.model_config import IndexConfig, ModelConfig
from bough.core.settings import MemorySettings, Settings
from bough.distributed.cost_model import Cluster
from bough.executor.load_model import check_experts, check_split, resolve_config
from bough.executor.splits import Outlook, outlooks, share_of, weight_bytes_of
from bough.launch.engine_processes import EngineProcesses
from bough.launch.head import Head
from bough.loader.locate import SHAPES, locate
from bough.messages.channels import KEY_LENGTH, KEY_VARIABLE

LLAMA_70B, DEEPSEEK_V3 = (
    json.loads((SHAPES / name / "config.json").read_text()) for name in ("llama-3.1-70b", "deepseek-v3")
)
GIB = 2**30


def config_of(folder: Path, fields: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(fields))
    return resolve_config(locate(str(folder)), Settings())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return config_of(tmp_path_factory.mktemp("llama"), LLAMA_70B)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return config_of(tmp_path_factory.mktemp("deepseek"), DEEPSEEK_V3)


@cache
def planned(config: ModelConfig, gpus: str, weight_bytes: float = 2.0, context: int = 2048) -> list[Outlook]:
    return outlooks(config, Settings(), Cluster.parse(gpus), weight_bytes, context)


def test_shares_are_those_of_the_model(llama: ModelConfig) -> None:
    one, eight = (share_of(llama, 2.0, torch.bfloat16, tp) for tp in (1, 8))
    assert one.nbytes == 2 * (70_553_706_496 - 8192), "all but the last norm"
    assert one.nbytes / 8 < eight.nbytes < 1.001 * one.nbytes / 8, "norms are on all ranks"
    assert one.kv_bytes == 80 * 2 * 8 * 128 * 2 == 8 * eight.kv_bytes
    assert one.decode_flops == 80 * 4 * 64 * 128 == 8 * eight.decode_flops


def test_a_model_of_70_billion_numbers_takes_two_gpus_at_least(llama: ModelConfig) -> None:
    fit = planned(llama, "8xH200")
    assert {each.split.tp * each.split.pp for each in fit} == {2, 4, 8}
    assert all(each.split.groups == each.split.ep == 1 for each in fit), "it has neither experts nor latents"
    assert fit[0].flags == "--tp-size 4 --dp-size 2"
    quickest = min(fit, key=lambda each: each.paces[0].step_ms)
    assert (quickest.split.tp, quickest.split.pp) == (8, 1)
    eight = next(each for each in fit if each.split.tp == 8)
    assert eight.weight_bytes == pytest.approx(141.1e9 / 8, rel=0.01)
    assert eight.kv_tokens == pytest.approx(eight.kv_bytes / (80 * 2 * 1 * 128 * 2), rel=1e-6)
    assert eight.weight_bytes + eight.kv_bytes <= 0.9 * 141 * GIB
    assert not planned(llama, "1xH200") and planned(llama, "1xH200", 1.0)


def test_deepseek_v3_takes_a_host_of_h200_in_eight_bits(deepseek: ModelConfig) -> None:
    assert not planned(deepseek, "8xH100") and not planned(deepseek, "8xH100", 1.0)
    assert not planned(deepseek, "8xH200")
    fit = planned(deepseek, "8xH200", 1.0)
    assert fit[0].split.groups > 1, "latents would be on all ranks"
    assert "--enable-dp-attention" in fit[0].flags
    plain = next(each for each in fit if each.split.tp == 8 and each.split.groups == 1)
    spread = next(each for each in fit if each.split.tp == 8 and each.split.groups == 8)
    assert spread.kv_tokens > 6 * plain.kv_tokens, "each rank has latents of its own requests only"
    assert spread.weight_bytes > plain.weight_bytes, "and attention's weights whole"


def test_what_is_planned_can_be_started(deepseek: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k" * KEY_LENGTH)
    monkeypatch.setattr(Head, "place_groups", lambda *given: [])  # it waits for the other hosts
    fit = planned(deepseek, "8xH200,2", 1.0)
    for part in ("--enable-dp-attention", "--pp-size", "--nnodes", "--ep-size"):
        assert any(part in each.flags for each in fit)
    assert any("--enable-dp-attention" in each.flags and "--nnodes" in each.flags for each in fit)
    for flags in {each.flags for each in fit}:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        parser = Parser(program="bough serve", about="")
        add_engine_flags(parser)
        typed = flags.replace("RANK", "0").replace("HOST:PORT", address)
        settings = Settings.from_flat(
            given_settings(parser.parse(["--model-shape", "deepseek-v3", *typed.split()]), {})
        )
        with contextlib.ExitStack() as cleanup:
            EngineProcesses(settings, cleanup)
        parallel = settings.parallel
        check_experts(deepseek, settings)
        check_split(deepseek, parallel.tp_size, parallel.ep_size, groups=parallel.groups)


def test_a_batch_that_does_not_fit_is_served_in_part(llama: ModelConfig) -> None:
    (each, *_) = [each for each in planned(llama, "8xH200", context=100_000) if each.split.tp == 8]
    assert [pace.requests for pace in each.paces] == [1, each.kv_tokens // 100_000, each.kv_tokens // 100_000]
    assert each.paces[-1].tokens_per_s == pytest.approx(each.paces[-1].requests * each.paces[-1].steps_per_s)


def test_a_smaller_cache_type_holds_more(llama: ModelConfig) -> None:
    settings = Settings(memory=MemorySettings(kv_cache_dtype="fp8_e4m3"))
    small = {each.split: each for each in outlooks(llama, settings, Cluster.parse("8xH200"), 2.0, 2048)}
    for each in planned(llama, "8xH200"):
        assert small[each.split].kv_tokens == pytest.approx(2 * each.kv_tokens, rel=1e-3)


def test_sizes_that_the_model_does_not_divide_are_left_out() -> None:
    config = resolve_config(locate(str(SHAPES / "qwen3-0.6b")), Settings())  # 16 heads, 8 key/value heads
    assert {each.split.tp for each in planned(config, "12xH200")} == {1, 2, 4}
    assert {each.split.pp for each in planned(config, "3xH200")} == {1, 3}


def test_stages_that_the_model_cannot_be_cut_into_are_left_out() -> None:
    """As with the layers of GLM that take the choice of tokens from another one."""
    whole = resolve_config(locate(str(SHAPES / "deepseek-v3")), Settings())
    assert whole.latent is not None and {each.split.pp for each in planned(whole, "16xH200", 1.0)} == {1, 2, 4, 8, 16}
    index = IndexConfig(2, 8, 4, layers=tuple(layer % 30 == 0 for layer in range(whole.num_layers)))
    config = replace(whole, latent=replace(whole.latent, index=index))
    assert {each.split.pp for each in planned(config, "16xH200", 1.0)} == {1, 2}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (None, 2.0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1.0),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        # These become 16-bit floats.
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, 2.0),
        ({"quant_method": "gptq", "bits": 8}, 2.0),
    ],
)
def test_a_checkpoint_says_how_wide_its_weights_are(tmp_path: Path, section: Any, expected: float) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_70B, "quantization_config": section}))
    assert weight_bytes_of(locate(str(tmp_path)), Settings()) == expected


def test_the_command_prints_a_table_and_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", "qwen3-0.6b", "--gpus", "2xL40S"]) == 0
    page = capsys.readouterr().out
    assert "| tp | pp | dp | ep |" in page and "1 at once: ms, tok/s" in page
    assert "bough serve --model-shape qwen3-0.6b --dp-size 2" in page and "modelled, not measured" in page
    assert main(["doctor", "--plan", "llama-3.1-8b", "--gpus", "8xH200"]) == 0
    told = capsys.readouterr().out
    assert "| 8 | 1 | 1 | 1 | 1 |" in told and told.endswith("--tp-size 8\n"), "what is recommended is in the table"
    assert main(["doctor", "--plan", "qwen3-0.6b", "--gpus", "8xH200,2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["context"] == 2048 and report["splits"][0]["servers"] == 2
    assert [pace["requests"] for pace in report["splits"][0]["paces"]] == [1, 128, 512]


def test_what_the_plan_was_made_with_is_typed_too(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--kv-cache-dtype", "fp8_e4m3", "--max-running-requests", "64", "--no-enable-mixed-chunk"]
    assert main(["doctor", "--plan", "llama-3.1-70b", "--gpus", "2xH200", *asked, "--disable-radix-cache"]) == 0
    told = capsys.readouterr().out
    flags = "--kv-cache-dtype fp8_e4m3 --disable-radix-cache --max-running-requests 64 --no-enable-mixed-chunk"
    assert f"bough serve --model-shape llama-3.1-70b {flags} --tp-size 2\n" in told


def test_a_model_that_fits_with_fewer_bits_only_is_planned_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    assert main(["doctor", "--plan", str(tmp_path), "--gpus", "1xH200"]) == 0
    page = capsys.readouterr().out
    assert "weights of 8 bits" in page and f"bough serve {tmp_path} --quantization fp8" in page
    assert main(["doctor", "--plan", str(tmp_path), "--gpus", "1xL40S"]) == 1
    assert "It does not fit" in capsys.readouterr().out
    assert main(["doctor", "--plan", str(tmp_path), "--gpus", "8xTPU"]) == 2
    assert "H200, L40S, MI300X" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_70B, "model_type": "llama"}))
    assert main(["doctor", "--plan", str(tmp_path), "--model-impl", "transformers"]) == 2
    assert "runs on one GPU, so there is no plan to make" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path), "--gpus", "1xH200"]) == 2
    assert "--gpus is what a plan is for: add --plan" in capsys.readouterr().err


def test_a_plan_is_in_formats_that_the_gpus_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Engines refuse --quantization fp8 there, and checkpoints of 8 bits become 16-bit floats."""
    assert main(["doctor", "--plan", "llama-3.1-70b", "--gpus", "1xA100"]) == 1
    page = capsys.readouterr().out
    assert "weights of 16 bits" in page and "It does not fit" in page
    stored = {**LLAMA_70B, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    for gpus, bits in (("8xL40S", 16), ("8xMI300X", 16), ("8xH100", 8)):
        assert main(["doctor", "--plan", str(tmp_path), "--gpus", gpus]) == 0
        assert f"weights of {bits} bits" in capsys.readouterr().out
    for gpus, given, why in (
        ("4xL40S", ["--quantization", "fp8"], "--quantization fp8 needs an NVIDIA GPU of compute capability 9.0"),
        ("4xA100", ["--kv-cache-dtype", "fp8_e4m3"], "needs a GPU of compute capability 8.9 or newer; use fp8_e5m2."),
    ):
        assert main(["doctor", "--plan", "llama-3.1-70b", "--gpus", gpus, *given]) == 2
        assert why in capsys.readouterr().err


def test_a_table_says_where_fewer_requests_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", "llama-3.1-70b", "--gpus", "8xH200", "--context-length", "120000"]) == 0
    heads, _, *rows = [line.split("|")[-3].strip() for line in capsys.readouterr().out.splitlines() if "|" in line]
    assert heads == "24 at once: ms, tok/s"
    assert "(" not in rows[0] and rows[2].endswith("(20 fit)"), "two replicas of ten requests each"


def test_a_name_of_the_hub_is_told_what_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--plan", "meta-llama/Llama-3.1-70B", "--gpus", "8xH200,4"]) == 1
    told = capsys.readouterr().err
    assert "not on disk: give its config.json or folder, or qwen3-0.6b, llama-3.1-8b, llama-3.1-70b," in told
