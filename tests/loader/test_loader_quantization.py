"""What config files say of quantised weights: read, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bough.core.errors import ModelError
from bough.loader.locate import ModelFiles
from bough.loader.quantization import Quantization, quantization_of

INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def compressed(weights: dict[str, Any], form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, **more}


def quark(dtype: str) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": dtype, "qscheme": "per_tensor"}}}


def found(folder: Path, section: dict[str, Any] | None, **config: Any) -> Quantization | None:
    given = config if section is None else {**config, "quantization_config": section}
    (folder / "config.json").write_text(json.dumps(given))
    return quantization_of(ModelFiles("tiny", folder, config=folder / "config.json"))


def test_plain_weights_have_none(tmp_path: Path) -> None:
    assert found(tmp_path, None) is None


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"quant_method": "fp8"}, Quantization("fp8", "FP8")),
        (
            {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
            Quantization("fp8", "FP8 in blocks of 128 x 128", blocks=(128, 128)),
        ),
        (compressed(INT4), Quantization("compressed-tensors", "compressed-tensors int4")),
        (
            compressed({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 64]}),
            Quantization("compressed-tensors", "compressed-tensors float8", blocks=(128, 64)),
        ),
        ({"quant_method": "awq", "bits": 4, "version": "GEMM"}, Quantization("awq", "AWQ with 4 bits")),
        ({"quant_method": "gptq", "bits": 4}, Quantization("gptq", "GPTQ with 4 bits", zero_shift=1)),
        (
            {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2", "dynamic": {"-:lm_head": {}}},
            Quantization("gptq", "GPTQ with 8 bits", bits=8),
        ),
        ({"quant_method": "mxfp4"}, Quantization("mxfp4", "MXFP4")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, Quantization("modelopt", "ModelOpt NVFP4")),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            Quantization("bitsandbytes", "bitsandbytes NF4"),
        ),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, Quantization("fp8", "FBGEMM FP8")),
        (quark("fp8_e4m3"), Quantization("quark", "Quark FP8")),
        (
            {"quant_method": "auto-round", "bits": 4, "extra_config": {"lm_head": {"bits": 16}}},
            Quantization("gptq", "AutoRound with 4 bits", zero_shift=1),
        ),
        (
            {"quant_method": "intel/auto-round", "bits": 8, "packing_format": "auto_round:gptqmodel"},
            Quantization("gptq", "AutoRound with 8 bits", bits=8),
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"},
            Quantization("awq", "AutoRound with 4 bits"),
        ),
    ],
)
def test_what_is_read(tmp_path: Path, section: dict[str, Any], expected: Quantization) -> None:
    assert found(tmp_path, section) == expected
    assert found(tmp_path, None, text_config={"quantization_config": section}) == expected


# Other names that checkpoints of SGLang's, vLLM's and transformers' formats have.
UNREAD = (
    *("aqlm", "bitblas", "bitnet", "deepspeedfp", "eetq", "exl2", "experts_int8", "fouroversix", "fp_quant"),
    *("gptq_bitblas", "gptq_marlin", "gptq_marlin_24", "awq_marlin", "higgs", "hqq", "inc", "ipex", "marlin"),
    *("metal", "mlx", "modelslim", "moe_wna16", "neuron_quant", "petit_nvfp4", "ptpc_fp8", "qqq", "quanto"),
    *("sinq", "spqr", "squeezellm", "torchao", "tpu_int8", "vptq", "w4afp8", "w8a8_fp8", "w8a8_int8"),
)


@pytest.mark.parametrize("method", UNREAD)
def test_other_methods_are_refused_with_what_would_work(tmp_path: Path, method: str) -> None:
    text = rf"'{method}' are not supported; supported are fp8, .*a GGUF file.*--quantization int8 or int4"
    with pytest.raises(ModelError, match=rf"config\.json, quantization_config: .*{text}"):
        found(tmp_path, {"quant_method": method, "bits": 4})


@pytest.mark.parametrize("name", ["quantization", "quantization_config"])
def test_mlx_is_known_by_its_fields(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=rf"{name}: weights quantised with 'mlx' are not supported"):
        found(tmp_path, None, **{name: {"group_size": 64, "bits": 4}})


def test_modelopt_has_a_file_of_its_own(tmp_path: Path) -> None:
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    assert found(tmp_path, None) == Quantization("modelopt", "ModelOpt FP8")


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"quant_method": "hqq"}, "'hqq' are not supported; supported are fp8, compressed-tensors, awq"),
        ({}, "'unnamed' are not supported"),
        (quark("int4"), "dtype 'int4' is not supported; supported are fp8_e4m3, int8, fp4"),
        ({"quant_method": "quark"}, "a global_quant_config without weight is not supported"),
        ({"quant_method": "auto-round", "bits": 2}, "bits 2 is not supported; supported are 4 and 8"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type 'mx_fp' is not supported"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:llm_compressor"},
            "packing_format 'auto_round:llm_compressor' is not supported",
        ),
        ({"quant_method": "auto-round", "bits": 4, "extra_config": {"a": {"bits": 8}}}, "bits 8 beside 4 is not"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
        (compressed(INT4, "marlin-24"), "format 'marlin-24' is not supported"),
        (compressed({**INT4, "num_bits": 3}), "num_bits 3 is not supported; supported are 4 and 8"),
        (compressed({**INT4, "type": "ternary"}), "type 'ternary' is not supported"),
        (compressed(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "a sparsity_config is not supported"),
        (compressed(INT4, transform_config={"config_groups": {"a": {}}}), "a transform_config is not supported"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported"),
        ({"quant_method": "awq", "bits": 8}, "bits 8 is not supported"),
        ({"quant_method": "gptq", "bits": 3}, "bits 3 is not supported"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin' is not supported"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format is not supported"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": {"bits": 8}}}, "dynamic with bits of its own"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes with 8 bits is not supported"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, section: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json, quantization_config.*{text}"):
        found(tmp_path, section)
