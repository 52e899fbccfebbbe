"""Quantised checkpoints from plain weights, packed as each format's definition says; nothing here is Bough's.

A packer rounds to nearest, the plainest rule, and also returns the values that its tensors stand for. The packers'
layouts are those of `tests/loader/quantised`, which the public tools wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FP8, FP8_LARGEST = torch.float8_e4m3fn, 448.0
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]
)  # fmt: skip
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # which output stands first, second, ... in a word
Tensors = dict[str, torch.Tensor]
Packer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Format:
    """A packer, and what config.json says of it."""

    pack: Packer
    config: Mapping[str, Any]


def words(codes: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Small integers packed into int32 along the last side, the first in the lowest bits."""
    count = 32 // bits
    grouped = codes.long().unflatten(-1, (-1, count))
    if places is not None:
        grouped = grouped[..., list(places)]
    packed = (grouped << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def integers(weight: torch.Tensor, size: int, bits: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Codes [outputs, inputs], scales and zero points [outputs, groups], and the values; scales are float16's."""
    groups = weight.unflatten(1, (-1, size))
    top = 2**bits - 1
    if symmetric:
        scales = groups.abs().amax(2) / (2 ** (bits - 1) - 0.5)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = groups.amin(2).clamp(max=-1e-6), groups.amax(2).clamp(min=1e-6)
        scales = (high - low) / top
        zeros = (-low / scales).round().clamp(1, top)
    scales = scales.half().float().clamp(min=2**-14)
    codes = (groups / scales[:, :, None] + zeros[:, :, None]).round().clamp(0, top)
    values = (codes - zeros[:, :, None]) * scales[:, :, None]
    return codes.flatten(1).long(), scales, zeros.long(), values.flatten(1)


def gptq(
    weight: torch.Tensor, size: int = 32, bits: int = 4, symmetric: bool = False, ordered: bool = False
) -> tuple[Tensors, torch.Tensor]:
    inputs = weight.shape[1]
    group_of = torch.arange(inputs) // size
    order = torch.arange(inputs)
    if ordered:  # inputs by their weight, as act-order quantises them
        order = weight.abs().sum(0).argsort(descending=True)
        group_of = group_of[order.argsort()]
    codes, scales, zeros, values = integers(weight[:, order], size, bits, symmetric)
    back = order.argsort()
    tensors = {
        "qweight": words(codes[:, back], bits).T.contiguous(),
        "qzeros": words((zeros - 1).T, bits),
        "scales": scales.T.half().contiguous(),
        "g_idx": group_of.int(),
    }
    return tensors, values[:, back]


def awq(weight: torch.Tensor, size: int = 32) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, values = integers(weight, size, 4, symmetric=False)
    tensors = {"qweight": words(codes.T, 4, AWQ_PLACES), "qzeros": words(zeros.T, 4, AWQ_PLACES)}
    return {**tensors, "scales": scales.T.half().contiguous()}, values


def packed_integers(weight: torch.Tensor, size: int = 32, symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, values = integers(weight, size, 4, symmetric)
    tensors = {"weight_packed": words(codes, 4), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        tensors["weight_zero_point"] = words(zeros.T, 4).T.contiguous()
    return tensors, values


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, scales, zeros, values = integers(weight, weight.shape[1], 8, symmetric=True)
    return {"weight": (codes - zeros).to(torch.int8), "weight_scale": scales}, values


def fp8(weight: torch.Tensor, scales: torch.Tensor, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and values, with scales [rows, columns] of blocks of that size."""
    spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[: weight.shape[0], : weight.shape[1]]
    numbers = (weight / spread).clamp(-FP8_LARGEST, FP8_LARGEST).to(FP8)
    return numbers, numbers.float() * spread


def fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax() / FP8_LARGEST
    numbers, values = fp8(weight, scale.view(1, 1), *weight.shape)
    return {"weight": numbers, "weight_scale": scale}, values


def fp8_channel(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / FP8_LARGEST
    numbers, values = fp8(weight, scales, 1, weight.shape[1])
    return {"weight": numbers, "weight_scale": scales}, values


def fp8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -inputs % 128, 0, -outputs % 128))
    scales = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).abs().amax((1, 3)) / FP8_LARGEST
    numbers, values = fp8(weight, scales, 128, 128)
    return {"weight": numbers, "weight_scale_inv": scales}, values


def e2m1(groups: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and values of groups [outputs, groups, size] over their scales."""
    scaled = groups / scales[:, :, None]
    codes = (scaled.abs()[..., None] - E2M1).abs().argmin(-1)
    values = E2M1[codes] * scaled.sign() * scales[:, :, None]
    codes = (codes | (scaled < 0).long() << 3).flatten(1)
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), values.flatten(1)


def nvfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = weight.unflatten(1, (-1, 16))
    whole = weight.abs().amax() / (6 * FP8_LARGEST)
    scales = (groups.abs().amax(2) / 6 / whole).clamp(min=2**-6).to(FP8)
    packed, values = e2m1(groups, scales.float() * whole)
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}, values


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2).clamp(min=2**-100).log2().floor() - 2).clamp(min=-127)
    packed, values = e2m1(groups, exponents.exp2())
    return {"weight_packed": packed, "weight_scale": (exponents + 127).to(torch.uint8)}, values


def nf4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    blocks = weight.flatten().unflatten(0, (-1, 64))
    largest = blocks.abs().amax(1)
    codes = ((blocks / largest[:, None])[..., None] - NF4).abs().argmin(-1)
    values = (NF4[codes] * largest[:, None]).view(weight.shape)
    pairs = codes.flatten()
    packed = (pairs[::2] << 4 | pairs[1::2]).to(torch.uint8)[:, None]
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    others = {"absmax": largest, "quant_map": NF4.clone(), "quant_state.bitsandbytes__nf4": text}
    return {"weight": packed, **{f"weight.{name}": value for name, value in others.items()}}, values


def _compressed(form: str, bits: int, kind: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq"}
FORMATS: dict[str, Format] = {
    "fp8-tensor": Format(fp8_tensor, {"quant_method": "fp8"}),
    "fp8-channel": Format(fp8_channel, _compressed("float-quantized", 8, "float")),
    "fp8-blocks": Format(fp8_blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "w4a16": Format(packed_integers, _compressed("pack-quantized", 4, "int")),
    "w4a16-zeros": Format(lambda w: packed_integers(w, symmetric=False), _compressed("pack-quantized", 4, "int")),
    "w4a16-64": Format(lambda w: packed_integers(w, 64), _compressed("pack-quantized", 4, "int")),
    "int8": Format(int8, _compressed("int-quantized", 8, "int")),
    "awq": Format(awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq": Format(gptq, GPTQ),
    "gptq-act-order": Format(lambda w: gptq(w, ordered=True), {**GPTQ, "desc_act": True}),
    "gptq-8": Format(lambda w: gptq(w, bits=8, symmetric=True), {**GPTQ, "bits": 8}),
    "modelopt-fp8": Format(fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-nvfp4": Format(nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "mxfp4": Format(mxfp4, _compressed("mxfp4-pack-quantized", 4, "float")),
    "bnb-nf4": Format(nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
}


# The usual size of groups, for models whose widths are multiples of it.
WIDE_FORMATS: dict[str, Format] = {
    "w4a16-128": Format(lambda w: packed_integers(w, 128), _compressed("pack-quantized", 4, "int")),
    "awq-128": Format(lambda w: awq(w, 128), {**FORMATS["awq"].config, "group_size": 128}),
    "gptq-128": Format(lambda w: gptq(w, 128), {**GPTQ, "group_size": 128}),
    "gptq-128-symmetric": Format(lambda w: gptq(w, 128, symmetric=True), {**GPTQ, "group_size": 128, "sym": True}),
}


def write_quantised(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], name: str, only: str = ""
) -> Tensors:
    """Writes a checkpoint whose projections are quantised, or those with `only` in their names; returns the values of
    all its weights."""
    form = (FORMATS | WIDE_FORMATS)[name]
    held, values = {}, {}
    for key, weight in weights.items():
        if not key.endswith(("_proj.weight", "_proj_with_mqa.weight")) or only not in key:
            held[key] = values[key] = weight.contiguous()
            continue
        tensors, values[key] = form.pack(weight.float())
        held |= {key.removesuffix("weight") + part: tensor.contiguous() for part, tensor in tensors.items()}
    folder.mkdir(exist_ok=True)
    content = dict(config)
    if form.config["quant_method"] == "modelopt":
        described = {"producer": {"name": "modelopt"}, "quantization": dict(form.config)}
        (folder / "hf_quant_config.json").write_text(json.dumps(described))
    else:
        content["quantization_config"] = dict(form.config)
    (folder / "config.json").write_text(json.dumps(content))
    save_file(held, folder / "model.safetensors")
    return values
