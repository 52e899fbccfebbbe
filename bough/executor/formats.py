"""Which number formats a device can compute with, found before anything is loaded."""

from __future__ import annotations

import torch

from bough.core.errors import SettingsError
from bough.core.settings import Settings

Capability = tuple[int, int]  # NVIDIA's, major and minor
FOR_CPUS = ("int8", "int4")  # what --quantization makes of floats there
SCALED_PRODUCTS: Capability = (9, 0)  # torch multiplies 8-bit rows with a scale each from Hopper on
E4M3_CONVERSION: Capability = (8, 9)


def capability_of(device: torch.device) -> Capability | None:
    """None for a CPU."""
    return None if device.type == "cpu" else torch.cuda.get_device_capability(device)


def check_number_formats(settings: Settings, capability: Capability | None) -> None:
    """Raises if the device cannot do what weights and cache are asked to be."""
    _check_weights(settings, capability)
    cache, path = settings.memory.kv_cache_dtype, settings.memory.quantization_param_path
    if not cache.startswith("fp8"):
        if path is not None:
            raise SettingsError("--quantization-param-path is for an fp8 cache; add --kv-cache-dtype fp8_e4m3.")
    elif capability is None:
        raise SettingsError(f"--kv-cache-dtype {cache} needs a GPU; on a CPU use auto or bf16.")
    elif cache == "fp8_e4m3" and capability < E4M3_CONVERSION:
        raise SettingsError(f"--kv-cache-dtype fp8_e4m3 needs a GPU of {_spelled(E4M3_CONVERSION)}; use fp8_e5m2.")


def _check_weights(settings: Settings, capability: Capability | None) -> None:
    if settings.model.quantization in FOR_CPUS and capability is not None:
        raise SettingsError(
            f"--quantization {settings.model.quantization} is for CPUs; on a GPU use auto, none or fp8."
        )
    if settings.model.quantization != "fp8":
        return
    if capability is None:
        raise SettingsError(f"--quantization fp8 needs a GPU; on a CPU use auto, none, {' or '.join(FOR_CPUS)}.")
    if capability < SCALED_PRODUCTS or torch.version.hip is not None:
        raise SettingsError(f"--quantization fp8 needs an NVIDIA GPU of {_spelled(SCALED_PRODUCTS)}; use none.")
    if settings.model.dtype not in ("auto", "bfloat16"):
        raise SettingsError(f"--quantization fp8 computes in bfloat16; leave out --dtype {settings.model.dtype}.")


def _spelled(capability: Capability) -> str:
    return "compute capability {}.{} or newer".format(*capability)
