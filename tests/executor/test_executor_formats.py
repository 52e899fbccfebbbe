"""Number formats that a device cannot compute with are refused, with what to use instead."""

from __future__ import annotations

import pytest

from bough.core.errors import SettingsError
from bough.core.settings import Settings
from bough.executor.build import Capability, check_number_formats

AMPERE, ADA, HOPPER = (8, 0), (8, 9), (9, 0)


@pytest.mark.parametrize(
    ("flat", "capability"),
    [
        ({}, None),
        ({"kv_cache_dtype": "bf16", "quantization": "none"}, None),
        ({"kv_cache_dtype": "fp8_e5m2"}, AMPERE),
        ({"kv_cache_dtype": "fp8_e4m3", "quantization_param_path": "x.json"}, ADA),
        ({"quantization": "fp8", "dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"}, HOPPER),
    ],
)
def test_what_a_device_can_do(flat: dict[str, str], capability: Capability | None) -> None:
    check_number_formats(Settings.from_flat(flat), capability)


@pytest.mark.parametrize(
    ("flat", "capability", "words"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, None, "on a CPU use auto or bf16"),
        ({"kv_cache_dtype": "fp8_e4m3"}, AMPERE, "use fp8_e5m2"),
        ({"quantization_param_path": "x.json"}, HOPPER, "add --kv-cache-dtype"),
        ({"quantization": "fp8"}, None, "on a CPU use auto, none, int8 or int4"),
        ({"quantization": "int8"}, HOPPER, "on a GPU use auto, none, fp8 or int4"),
        ({"quantization": "fp8"}, ADA, r"compute capability 9\.0"),
        ({"quantization": "fp8", "dtype": "float32"}, HOPPER, "leave out --dtype float32"),
    ],
)
def test_what_it_cannot(flat: dict[str, str], capability: Capability | None, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        check_number_formats(Settings.from_flat(flat), capability)
