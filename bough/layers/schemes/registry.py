"""Schemes by the name that `--quantization` has for them."""

from __future__ import annotations

from collections.abc import Callable

from bough.layers.placement import WeightMaker
from bough.layers.schemes.fp8 import Fp8Scheme
from bough.layers.schemes.plain import PlainWeight

SCHEMES: dict[str, Callable[[], WeightMaker]] = {
    "auto": lambda: PlainWeight,
    "none": lambda: PlainWeight,
    "fp8": Fp8Scheme,
}


def scheme_for(quantization: str) -> WeightMaker:
    """A fresh scheme, for one model."""
    return SCHEMES[quantization]()
