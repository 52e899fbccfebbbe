from __future__ import annotations

import importlib.metadata
import json
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bough.cli import doctor
from bough.cli.main import main
from bough.loader import catalogue
from bough.native.library import instruction_sets, load_library, use_instruction_set

Capture = pytest.CaptureFixture[str]

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

LARGER = {**TINY, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path / "no" / "such" / "home"))
    return tmp_path / "no" / "such" / "home"


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


def examine(capsys: Capture, *flags: str, code: int = 0) -> dict[str, Any]:
    assert main(["doctor", "--json", *flags]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_the_report_has_all_its_parts(capsys: Capture, home: Path, tiny: str) -> None:
    report = examine(capsys, "--model", tiny, "--cpu-threads", "1")
    assert report.keys() == {"ok", "version", "machine", "use", "fit", "missing"}
    assert report["ok"] is True
    machine = report["machine"]
    assert 1 <= machine["cores"] <= machine["cores_total"]
    assert 0 < machine["memory_free_bytes"] <= machine["memory_total_bytes"]
    assert machine["disk_free_bytes"] > 0
    assert machine["home"] == str(home) and not home.exists(), "looking must not leave traces"
    assert report["use"]["threads"] == 1
    assert report["use"]["torch"] and report["use"]["device"] == "cpu" and report["use"]["dtype"] == "float32"


def test_what_fits_is_counted_as_the_engine_would(capsys: Capture, tiny: str) -> None:
    fit = examine(capsys, "--model", tiny)["fit"]
    per_layer = 16 * 16 + 2 * 8 * 16 + 16 * 16 + 3 * 16 * 32 + 2 * 16
    assert fit["weight_bytes"] == 4 * (2 * 64 * 16 + 2 * per_layer + 16)
    assert fit["kv_bytes_per_token"] == 2 * 2 * 2 * 4 * 4
    assert fit["context_length"] == 128
    assert fit["kv_tokens"] == 32 * 128
    main(["doctor", "--model", tiny])
    assert "32 requests of 128 tokens" in capsys.readouterr().out


def test_flags_change_what_fits(capsys: Capture, tiny: str) -> None:
    flags = ("--dtype", "bfloat16", "--max-total-tokens", "77", "--page-size", "4", "--context-length", "64")
    report = examine(capsys, "--model", tiny, *flags)
    assert report["use"]["dtype"] == "bfloat16"
    assert report["fit"]["kv_bytes_per_token"] == 2 * 2 * 2 * 4 * 2
    assert (report["fit"]["kv_tokens"], report["fit"]["context_length"]) == (76, 64)


def test_a_model_that_is_not_fetched_is_no_failure_and_not_fetched(capsys: Capture, home: Path) -> None:
    report = examine(capsys)
    assert report["fit"]["model"] == catalogue.DEFAULT.name
    assert report["fit"]["kv_tokens"] is None
    assert f"bough models pull {catalogue.DEFAULT.name}" in [finding["fix"] for finding in report["missing"]]
    assert not home.exists()


def test_a_repository_that_is_not_in_the_hubs_cache_is_not_fetched(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def absent(repository: str, **options: Any) -> str:
        assert options["local_files_only"]
        raise huggingface_hub.errors.LocalEntryNotFoundError("not here")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", absent)
    report = examine(capsys, "--model", "org/name")
    assert "hf download org/name" in [finding["fix"] for finding in report["missing"]]


@pytest.mark.parametrize("free", [1_000, 27_000])
def test_what_does_not_fit_is_a_failure(free: int, capsys: Capture, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: free)
    report = examine(capsys, "--model", tiny, code=1)
    assert report["fit"]["note"] == "does not fit"
    assert [finding["needed"] for finding in report["missing"]][-1] is True


def test_the_model_may_be_an_argument_and_a_configuration_alone(capsys: Capture, tiny: str) -> None:
    named, alone = (examine(capsys, path)["fit"] for path in (tiny, f"{tiny}/config.json"))
    assert {**named, "model": ""} == {**alone, "model": ""} and named["kv_tokens"] > 0
    assert main(["doctor", tiny, "--model-path", "other"]) == 2
    assert "given twice" in capsys.readouterr().err


@pytest.mark.skipif(load_library() is None, reason="the CPU kernels are not compiled, which quantise")
def test_what_fits_with_fewer_bits_is_said_with_its_flags(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LARGER, "dtype": "float32"}))
    whole = examine(capsys, str(tmp_path))["fit"]["weight_bytes"]
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: int(0.6 * whole))
    report = examine(capsys, str(tmp_path), code=1)
    assert report["fit"]["flags"] == "--quantization int8"
    assert report["fit"]["weight_bytes"] < 0.4 * whole
    assert report["missing"][-1]["fix"] == "add --quantization int8"
    fitting = examine(capsys, str(tmp_path), "--quantization", "int8")
    assert fitting["fit"]["flags"] == "" and fitting["fit"]["kv_tokens"] == report["fit"]["kv_tokens"]


@pytest.mark.slow
@pytest.mark.skipif(load_library() is None, reason="the CPU kernels are not compiled, which keep 16 bits")
def test_a_configuration_alone_is_counted_as_its_files(capsys: Capture, tmp_path: Path) -> None:
    import torch
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LARGER, "tie_word_embeddings": True}))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "whole")
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    whole, alone = (examine(capsys, str(tmp_path / name))["fit"] for name in ("whole", "alone"))
    assert {**whole, "model": "", "note": "", "kv_tokens": 0} == {**alone, "model": "", "note": "", "kv_tokens": 0}
    assert whole["weight_bytes"] == pytest.approx(2 * model.num_parameters(), rel=0.01)


@pytest.mark.skipif(load_library() is None, reason="the CPU kernels are not compiled, which keep 4 bits")
@pytest.mark.parametrize(
    ("quantization", "share"),
    [
        (AWQ, 0.31),  # of 16 bits
        (GPTQ, 0.31),
        ({**GPTQ, "bits": 8}, 0.53),
        ({**GPTQ, "desc_act": True}, 1.0),
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 1.0),
    ],
)
def test_quantised_layers_are_counted_as_a_cpu_keeps_them(
    quantization: dict[str, Any], share: float, capsys: Capture, tmp_path: Path
) -> None:
    plain, quantised = tmp_path / "plain", tmp_path / "quantised"
    for folder, more in ((plain, {}), (quantised, {"quantization_config": quantization})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**LARGER, **more}))
    whole, kept = (examine(capsys, str(folder))["fit"]["weight_bytes"] for folder in (plain, quantised))
    assert kept / whole == pytest.approx(share, abs=0.02)


def test_the_back_end_is_the_one_that_computes_the_model(
    capsys: Capture, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The native kernels have no recurrent layers."""
    shape = {**TINY, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_multiple_of": 16}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "architectures": ["Lfm2ForCausalLM"]}))
    assert examine(capsys, str(tmp_path))["use"]["attention_backend"] == "torch"
    if load_library() is not None:
        assert examine(capsys, tiny)["use"]["attention_backend"] == "native"
        assert examine(capsys, tiny, "--dtype", "bfloat16")["use"]["attention_backend"] == "torch"


@pytest.mark.parametrize(
    ("room", "flags"),
    [
        (4 * 16_384, ""),
        (17_000, "--max-total-tokens 16384"),
        (10_000, "--context-length 2500"),
        (4 * 16_000, "--max-total-tokens 16384"),
    ],
)
def test_flags_with_which_the_context_fits_are_said_and_work(
    room: int, flags: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for so many tokens, of which an engine on a CPU takes a quarter by itself."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "max_position_embeddings": 16_384}))
    fit = examine(capsys, str(tmp_path))["fit"]
    free = fit["weight_bytes"] + room * fit["kv_bytes_per_token"]
    monkeypatch.setattr(doctor, "free_memory_bytes", lambda: free)
    report = examine(capsys, str(tmp_path))
    assert report["fit"]["flags"] == flags
    if flags:
        assert report["missing"][-1] == {
            "needed": False,
            "what": f"The context of 16,384 tokens does not fit: there is room for {room // 4:,}.",
            "fix": f"add {flags}",
        }
    with_flags = examine(capsys, str(tmp_path), *flags.split())["fit"]
    assert with_flags["flags"] == "" and with_flags["kv_tokens"] >= with_flags["context_length"]


@pytest.mark.parametrize(
    ("free_gib", "devices", "flags", "code"),
    [(68, 1, "--kv-cache-dtype fp8_e4m3", 0), (66, 1, "--quantization fp8", 0), (40, 2, "--tp-size 2", 1)],
)
def test_a_gpu_is_given_the_flags_that_cost_least(
    free_gib: int, devices: int, flags: str, code: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-30B-A3B takes 57 GiB, and its context 4 GiB more."""
    import torch

    shape = Path(doctor.__file__).parents[1] / "loader" / "shapes" / "qwen3-30b-a3b" / "config.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda each: SimpleNamespace(name="GPU", total_memory=0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib << 30, 80 << 30))
    report = examine(capsys, str(shape), code=code)
    assert report["fit"]["flags"] == flags
    with_flags = examine(capsys, str(shape), *flags.split())["fit"]
    assert with_flags["flags"] == "" and with_flags["kv_tokens"] >= with_flags["context_length"]


@pytest.mark.parametrize(
    ("quantization", "share"),
    [
        (AWQ, 0.27),
        ({"quant_method": "fp8"}, 0.52),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 0.52),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 1.0),  # these become 16-bit floats
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 1.0),
        ({**GPTQ, "bits": 8}, 1.0),
        ({**GPTQ, "desc_act": True}, 1.0),
    ],
)
def test_quantised_layers_are_counted_as_a_gpu_keeps_them(
    quantization: dict[str, Any], share: float, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (140 << 30, 141 << 30))
    sizes = []
    for more in ({}, {"quantization_config": quantization}):
        (tmp_path / "config.json").write_text(json.dumps({**LARGER, **more}))
        report = examine(capsys, str(tmp_path))
        assert report["use"]["attention_backend"] == "triton"
        sizes.append(report["fit"]["weight_bytes"])
    assert sizes[1] / sizes[0] == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize(("free_gib", "flags"), [(140, ""), (64, "--quantization fp8"), (20, None)])
def test_a_gpu_is_counted_with_its_own_memory(
    free_gib: int, flags: str | None, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-30B-A3B has 61.1 GB of weights in 16 bits, a little more than half of that in 8."""
    import torch

    shape = Path(doctor.__file__).parents[1] / "loader" / "shapes" / "qwen3-30b-a3b" / "config.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib << 30, 141 << 30))
    report = examine(capsys, str(shape), code=0 if flags == "" else 1)
    assert report["use"]["device"] == "cuda" and report["use"]["dtype"] == "bfloat16"
    if flags is None:
        assert report["fit"]["note"] == "does not fit" and report["fit"]["kv_tokens"] is None
    else:
        assert report["fit"]["flags"] == flags
        assert report["fit"]["weight_bytes"] == pytest.approx(61.1e9 if flags == "" else 31e9, rel=0.02)
        assert report["fit"]["kv_tokens"] > 10_000


@pytest.mark.parametrize(
    ("capability", "free_gib", "flags"),
    [
        ((8, 0), 68, "--quantization int4"),
        ((8, 9), 66, "--quantization int4"),
        ((8, 9), 68, "--kv-cache-dtype fp8_e4m3"),
    ],
)
def test_a_gpu_is_given_formats_that_it_has(
    capability: tuple[int, int], free_gib: int, flags: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where an engine would refuse 8 bits they are no remedy, and checkpoints of 8 bits become 16-bit floats."""
    import torch

    shape = Path(doctor.__file__).parents[1] / "loader" / "shapes" / "qwen3-30b-a3b" / "config.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda each: SimpleNamespace(name="GPU", total_memory=0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gib << 30, 80 << 30))
    assert examine(capsys, str(shape))["fit"]["flags"] == flags


def test_a_format_that_the_device_lacks_is_told(capsys: Capture, tiny: str) -> None:
    report = examine(capsys, tiny, "--quantization", "fp8", code=1)
    (told,) = [finding for finding in report["missing"] if finding["needed"]]
    assert told["what"].startswith("--quantization fp8 needs a GPU") and told["fix"] == "add --quantization int8"


def test_missing_packages_are_a_failure_with_its_cure(
    capsys: Capture, tiny: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = ["torch>=2.10", "no-such-package>=1", "absent-codec; extra == 'media'", "absent-tool; extra == 'dev'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: stated)
    missing = examine(capsys, "--model", tiny, code=1)["missing"]
    assert {"needed": True, "what": "The package no-such-package is not installed."} | {
        "fix": "pip install no-such-package"
    } in missing
    assert ("pip install 'bough[media]'", False) in [(finding["fix"], finding["needed"]) for finding in missing]
    assert "absent-tool" not in str(missing)


def test_a_broken_torch_is_a_failure(capsys: Capture, tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "load_torch", lambda: None)
    report = examine(capsys, "--model", tiny, code=1)
    assert report["use"]["torch"] is None
    assert report["fit"]["note"] == "unknown without torch"
    assert "pip install --force-reinstall torch" in [finding["fix"] for finding in report["missing"]]


def test_a_model_that_does_not_exist_is_an_error(capsys: Capture) -> None:
    assert main(["doctor", "--model", "smolm2"]) == 1
    assert capsys.readouterr().err.startswith("bough: Unknown model 'smolm2'")


def test_the_page_is_for_people(capsys: Capture, tiny: str) -> None:
    assert main(["doctor", "--model", tiny]) == 0
    page = capsys.readouterr().out
    assert "This machine" in page and "An engine would use" in page
    assert "4,096 tokens, 32.0 times the context of 128" in page
    assert "\x1b" not in page


def test_the_instruction_set_is_named_and_can_be_chosen(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_library()
    if library is None:
        pytest.skip("the CPU kernels are not compiled")
    try:
        assert examine(capsys)["use"]["cpu_instruction_set"] == instruction_sets(library)[-1]
        assert examine(capsys, "--cpu-instruction-set", "plain")["use"]["cpu_instruction_set"] == "plain"
        monkeypatch.setenv("BOUGH_CPU_INSTRUCTION_SET", "plain")
        assert examine(capsys)["use"]["cpu_instruction_set"] == "plain"
        other = "avx2" if platform.machine() == "aarch64" else "neon"
        assert main(["doctor", "--cpu-instruction-set", other]) != 0
        assert f"what this CPU has: {', '.join(instruction_sets(library))}" in capsys.readouterr().err
    finally:
        monkeypatch.delenv("BOUGH_CPU_INSTRUCTION_SET")
        use_instruction_set("auto")


def test_an_engine_is_told_by_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_library()
    if library is None:
        pytest.skip("the CPU kernels are not compiled")
    monkeypatch.setenv("BOUGH_CPU_INSTRUCTION_SET", "plain")
    try:
        use_instruction_set("auto")
        assert instruction_sets(library) == ["plain"]
    finally:
        monkeypatch.delenv("BOUGH_CPU_INSTRUCTION_SET")
        use_instruction_set("auto")
