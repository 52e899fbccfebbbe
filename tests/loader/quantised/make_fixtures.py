# mypy: ignore-errors
"""Writes the files beside this script: one small matrix of each quantised format, packed by the public tool, with the
values that the tool itself dequantises it to (`expected`) and the quantization_config in the file's metadata.

Needs compressed-tensors 0.20, bitsandbytes 0.50, nvidia-modelopt 0.47, gptqmodel 7.7, auto-round 0.16, amd-quark 0.13
and AutoAWQ 0.2.9 (of which only the packing is imported), none of which Bough uses: `python make_fixtures.py
path/to/autoawq`.
"""

import importlib.util
import json
import sys
import tempfile
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).parent
OUTPUTS, INPUTS = 32, 96


def write(name, config, tensors, expected):
    tensors = {f"layer.{key}": value.detach().clone().contiguous() for key, value in tensors.items()}
    held = {**tensors, "expected": expected.detach().float().contiguous()}
    save_file(held, HERE / f"{name}.safetensors", metadata={"quantization_config": json.dumps(config)})
    print(name, {key: (tuple(value.shape), str(value.dtype)) for key, value in held.items()})


def weights(outputs=OUTPUTS, inputs=INPUTS):
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(7)) * 0.05


def compressed_tensors():
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    def limits(weight, args):
        if args.strategy == "group" or args.strategy == "tensor_group":
            grouped = weight.unflatten(-1, (-1, args.group_size))
            return grouped.amin(-1), grouped.amax(-1)
        if args.strategy == "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        if args.strategy == "block":
            height, width = args.block_structure
            rows, columns = -(-weight.shape[0] // height), -(-weight.shape[1] // width)
            low, high = torch.empty(rows, columns), torch.empty(rows, columns)
            for row in range(rows):
                for column in range(columns):
                    block = weight[row * height : (row + 1) * height, column * width : (column + 1) * width]
                    low[row, column], high[row, column] = block.min(), block.max()
            return low, high
        return weight.min().view(1), weight.max().view(1)

    def one(name, form, config):
        args = QuantizationArgs(**config)
        scheme = QuantizationScheme(targets=["Linear"], weights=args, format=form)
        weight = weights()
        state = {"weight": weight}
        low, high = limits(weight, args)
        if args.strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        scale, zero = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
        state |= {"weight_scale": scale.float(), "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(form)
        packed = compressor.compress(state, scheme)
        groups = {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}}
        expected = compressor.decompress(packed, scheme)["weight"]
        if args.strategy == "tensor_group":  # which the compressor gives in bfloat16
            values = unpack_fp4_from_uint8(packed["weight_packed"], OUTPUTS, INPUTS, torch.float32)
            whole = packed["weight_global_scale"]
            expected = dequantize(values, packed["weight_scale"].float(), args=args, global_scale=whole)
        outer = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
        write(name, outer, packed, expected)

    int4 = {"num_bits": 4, "type": "int", "strategy": "group"}
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    one("ct_int4", "pack-quantized", {**int4, "group_size": 32, "symmetric": True})
    one("ct_int4_zeros", "pack-quantized", {**int4, "group_size": 32, "symmetric": False})
    one("ct_int8_packed", "pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True})
    one("ct_int8", "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True})
    one("ct_fp8_channel", "float-quantized", {**fp8, "strategy": "channel"})
    one("ct_fp8_tensor", "float-quantized", {**fp8, "strategy": "tensor"})
    one("ct_fp8_block", "float-quantized", {**fp8, "strategy": "block", "block_structure": [24, 64]})
    nvfp4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    one("ct_nvfp4", "nvfp4-pack-quantized", {**nvfp4, "scale_dtype": "torch.float8_e4m3fn"})
    mxfp4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
    one("ct_mxfp4", "mxfp4-pack-quantized", {**mxfp4, "scale_dtype": "torch.uint8"})


def bitsandbytes():
    import bitsandbytes.functional as F

    for name, kind, nested in (("bnb_nf4", "nf4", False), ("bnb_nf4_nested", "nf4", True), ("bnb_fp4", "fp4", True)):
        # 40 inputs: rows do not end where blocks of 64 do.
        packed, state = F.quantize_4bit(weights(32, 40), blocksize=64, compress_statistics=nested, quant_type=kind)
        tensors = {"weight": packed, **{f"weight.{key}": value for key, value in state.as_dict(packed=True).items()}}
        config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        write(name, config, tensors, F.dequantize_4bit(packed, state))


def modelopt():
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    weight = weights()
    quantized, scale, whole = NVFP4QTensor.quantize(weight, 16)
    tensors = {"weight": quantized._quantized_data, "weight_scale": scale, "weight_scale_2": whole}
    expected = quantized.dequantize(dtype=torch.float32, scale=scale, double_scale=whole, block_sizes={-1: 16})
    write("modelopt_nvfp4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, tensors, expected)
    quantized, scale = FP8QTensor.quantize(weight)
    expected = quantized.dequantize(dtype=torch.float32, scale=scale)
    tensors = {"weight": quantized._quantized_data, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    write("modelopt_fp8", {"quant_method": "modelopt", "quant_algo": "FP8"}, tensors, expected)


def grouped_parameters(weight, size, symmetric, bits=4):
    """Scales and zero points by the plainest rule. [outputs, groups]"""
    groups = weight.unflatten(1, (-1, size))
    if symmetric:
        scale = groups.abs().amax(2) / (2 ** (bits - 1) - 1)
        return scale, torch.full_like(scale, 2 ** (bits - 1))
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = (high - low) / (2**bits - 1)
    return scale, (-low / scale).round().clamp(1, 2**bits - 1)


def gptq():
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    cases = (("gptq", 4, 32, False, False), ("gptq_sym", 4, 96, True, False), ("gptq_order", 4, 32, False, True))
    for name, bits, size, symmetric, permuted in (*cases, ("gptq_8", 8, 32, True, False)):
        linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
        linear.weight.data = weights()
        groups = torch.arange(INPUTS) // size
        if permuted:
            groups = groups[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(1))]
        ordered = linear.weight.data[:, groups.argsort(stable=True)]
        scale, zero = grouped_parameters(ordered, size, symmetric, bits)
        scale = scale.half().float()
        module = TorchLinear(
            bits=bits, group_size=size, sym=symmetric, desc_act=permuted, in_features=INPUTS, out_features=OUTPUTS,
            bias=False, pack_dtype=torch.int32, register_buffers=True,
        )  # fmt: skip
        module.pack(linear, scale, zero, groups.int())
        module.scales = module.scales.float()
        module.enable_wf_unsqueeze = True
        expected = module.dequantize_weight().T
        module.scales = module.scales.half()
        for version in ("gptq_v2", "gptq"):
            tensors = {key: getattr(module, key) for key in ("qweight", "qzeros", "scales", "g_idx")}
            config = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric}
            config |= {"desc_act": permuted, "checkpoint_format": version}
            if version == "gptq" or name == "gptq":
                write(name if version == "gptq" else f"{name}_v2", config, tensors, expected)
            if version == "gptq_v2":
                convert_gptq_v2_to_v1_format_module(module, types.SimpleNamespace(bits=bits, pack_dtype=torch.int32))


def awq(path):
    def module(name, file):
        spec = importlib.util.spec_from_file_location(name, Path(path, file))
        made = importlib.util.module_from_spec(spec)
        sys.modules[name] = made
        spec.loader.exec_module(made)
        return made

    stubs = {"awq.utils.module": {"try_import": lambda name: (None, "")}}
    stubs |= {"awq.utils.utils": {"get_best_device": lambda: "cpu"}, "awq": {}, "awq.utils": {}}
    for name, content in stubs.items():
        sys.modules[name] = types.SimpleNamespace(**content)
    packing = module("awq.utils.packing_utils", "awq/utils/packing_utils.py")
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = weights()
    scale, zero = grouped_parameters(linear.weight.data, 32, symmetric=False)
    scale = scale.half().float()
    gemm = module("awq.modules.linear.gemm", "awq/modules/linear/gemm.py").WQLinear_GEMM
    packed = gemm.from_linear(linear, 4, 32, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
    tensors = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales")}
    expected = packing.dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, 32).T
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    write("awq", config, tensors, expected)


def auto_round():
    """Its two ways to pack zero points; the third is AWQ's."""
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = weights()
    scale, zero = grouped_parameters(linear.weight.data, 32, symmetric=False)
    scale = scale.half().float()
    kinds = {"auto_round": ("auto_round", qlinear_torch), "auto_round_gptq": ("auto_round:auto_gptq", qlinear_torch_zp)}
    for name, (packing, module) in kinds.items():
        packed = module.QuantLinear(4, 32, INPUTS, OUTPUTS, bias=False)
        packed.device = "cpu"
        packed.pack(linear, scale, zero)
        tensors = {key: getattr(packed, key) for key in ("qweight", "qzeros", "scales")}
        packed.scales = packed.scales.float()
        expected = packed(torch.eye(INPUTS)).T
        config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "packing_format": packing}
        write(name, config, tensors, expected)


def quark():
    """Exports models of one layer, of which one projection is kept."""
    from quark.torch import ModelQuantizer, export_safetensors
    from quark.torch.quantization.config import config as kinds
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": INPUTS, "intermediate_size": 64, "num_attention_heads": 3, "num_key_value_heads": 1}
    shape = LlamaConfig(**sizes, vocab_size=64, num_hidden_layers=1, head_dim=OUTPUTS)
    rounding = {"symmetric": True, "scale_type": "float", "round_method": "half_even"}
    specs = {
        "quark_fp8": kinds.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False),
        "quark_fp8_channel": kinds.FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0),
        "quark_int8": kinds.Int8PerChannelSpec(**rounding, ch_axis=0, is_dynamic=False),
        "quark_mxfp4": kinds.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
    }
    for name, spec in specs.items():
        model = LlamaForCausalLM(shape).float().eval()
        model.model.layers[0].self_attn.k_proj.weight.data = weights()
        layer = kinds.QLayerConfig(weight=spec.to_quantization_spec())
        quantizer = ModelQuantizer(kinds.QConfig(global_quant_config=layer, exclude=["lm_head"]))
        model = quantizer.freeze(quantizer.quantize_model(model, [torch.arange(16)[None]]))
        expected = model.model.layers[0].self_attn.k_proj.weight.detach().clone()
        with tempfile.TemporaryDirectory() as folder:
            export_safetensors(model, folder)
            config = json.loads(Path(folder, "config.json").read_text())["quantization_config"]
            held = load_file(Path(folder, "model.safetensors"))
        prefix = "model.layers.0.self_attn.k_proj."
        tensors = {key.removeprefix(prefix): value for key, value in held.items() if key.startswith(prefix)}
        write(name, config, tensors, expected)


def fbgemm():
    """By the format's definition, as Transformers' module for it computes."""
    weight = weights()
    scale = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": numbers, "weight_scale": scale, "input_scale_ub": torch.tensor([1200.0])}
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    write("fbgemm_fp8", config, tensors, numbers.float() * scale)


def experts():
    """gpt_oss's fused experts, packed here by the format's definition and dequantised by Transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (3, 24, 2, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 24, 2), generator=draw, dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    tensors = {"gate_up_proj_blocks": blocks, "gate_up_proj_scales": scales}
    write("mxfp4", {"quant_method": "mxfp4"}, tensors, expected)


if __name__ == "__main__":
    experts()
    bitsandbytes()
    modelopt()
    compressed_tensors()
    fbgemm()
    auto_round()
    quark()
    awq(sys.argv[1])
    gptq()
