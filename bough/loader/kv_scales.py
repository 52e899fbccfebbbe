"""The scales of an 8-bit KV cache: from the checkpoint, if it was calibrated, or from a file of the user's.

Both say by what stored keys and values are multiplied to get them back. What they are used for is the pool's business.
"""

import json
import math
from collections.abc import Sequence

from bough.core.errors import ModelError, SettingsError
from bough.core.files import user_path
from bough.loader.source import WeightSource

Scales = list[tuple[float, float]]  # of keys and of values, for each layer
# Where tools that calibrate put them, beside the projections of a layer's attention.
KEY_NAMES = ("k_scale", "k_proj.k_scale", "attn.k_scale")
VALUE_NAMES = ("v_scale", "v_proj.v_scale", "attn.v_scale")


def checkpoint_scales(source: WeightSource, layers: int) -> Scales:
    """What the checkpoint says; 1 where it says nothing."""
    held = set(source.names())

    def scale(layer: int, names: Sequence[str]) -> float:
        for name in (f"model.layers.{layer}.self_attn.{suffix}" for suffix in names):
            if name in held:
                values = source.read(name)
                if values.numel() != 1 or not _usable(float(values)):
                    raise ModelError(f"Tensor {name} must be one number above 0; without it the scale would be 1.")
                return float(values)
        return 1.0

    return [(scale(layer, KEY_NAMES), scale(layer, VALUE_NAMES)) for layer in range(layers)]


def file_scales(path: str, layers: int, rank: int = 0) -> Scales:
    """{"kv_cache": {"scaling_factor": {rank: {layer: number}}}}: one number for a layer's keys and values alike."""
    try:
        content = json.loads(user_path(path).read_text(encoding="utf-8"))
        factors = content["kv_cache"]["scaling_factor"][str(rank)]
        scales = [float(factors[str(layer)]) for layer in range(layers)]
    except OSError as error:
        raise SettingsError(f"--quantization-param-path {path} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError) as error:
        raise SettingsError(
            f'--quantization-param-path {path} must hold {{"kv_cache": {{"scaling_factor": {{"{rank}": {{"0": 1.0, '
            f"...}}}}}}}} with a number for each of the {layers} layers; it fails at {error}."
        ) from None
    for layer, scale in enumerate(scales):
        if not _usable(scale):
            raise SettingsError(f"--quantization-param-path {path}: layer {layer} has {scale}, which is not above 0.")
    return [(scale, scale) for scale in scales]


def _usable(scale: float) -> bool:
    return math.isfinite(scale) and scale > 0.0
