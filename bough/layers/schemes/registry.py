"""Schemes by the name that `--quantization` has for them."""

from collections.abc import Callable

from bough.layers.placement import ExpertsMaker, TableMaker, WeightMaker
from bough.layers.schemes.fp8 import Fp8Scheme, fp8_experts
from bough.layers.schemes.plain import PlainExperts, PlainWeight
from bough.layers.schemes.stored import Int8Head, W4Scheme

SCHEMES: dict[str, Callable[[], WeightMaker]] = {
    "auto": lambda: PlainWeight,
    "none": lambda: PlainWeight,
    "fp8": Fp8Scheme,
    "int4": W4Scheme,
}


def scheme_for(quantization: str) -> WeightMaker:
    """A fresh scheme, for one model."""
    return SCHEMES[quantization]()


def experts_for(quantization: str) -> ExpertsMaker:
    """What makes the experts of such a model."""
    return {"fp8": fp8_experts, "int4": W4Scheme().experts}.get(quantization, PlainExperts)


def head_for(quantization: str) -> TableMaker | None:
    """What makes the head of such a model, unless it is made as tables are: 4 bits of a vocabulary alone would cost
    more than those of all layers."""
    return Int8Head if quantization == "int4" else None
