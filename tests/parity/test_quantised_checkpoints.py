"""Checkpoints of every quantised format: the logits and greedy tokens that transformers computes from the values that
the format stands for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from bough.core.errors import ModelError
from bough.core.model_config import ModelConfig
from bough.distributed.group import ALONE, RankGroup
from bough.kernels.quant_linear.packed import Format as Packed
from bough.layers.weights import WeightSlot
from bough.loader.config import read_config
from bough.loader.load import check_weights, kept_forms, load_weights, open_source
from bough.loader.locate import locate
from bough.loader.source import SafetensorsSource
from bough.models.base import CausalLM
from bough.models.registry import build_model
from bough.native.library import load_library
from tests.fakes.forward import CPU, Forward
from tests.fakes.held_values import held_values
from tests.fakes.native_forward import NativeForward
from tests.fakes.quantised import FORMATS, WIDE_FORMATS, write_quantised
from tests.fakes.ranks import ThreadGroup, on_ranks

SIZES = {
    "vocab_size": 211,
    "hidden_size": 192,  # no multiple of 128
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 8}
PROMPT = [5, 17, 200, 3, 91, 44, 12, 7]
NEW_TOKENS = 12


def random_model(made: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    made = made.float().eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return made


def load(folder: Path, kept: bool = False, group: RankGroup = ALONE) -> tuple[CausalLM, ModelConfig]:
    """Dequantised, or with weights in the checkpoint's numbers as GPUs keep them, multiplied by the references."""
    files = locate(str(folder))
    config = read_config(files)
    source = open_source(files, config)
    form_of = kept_forms(source, fp8=True) if kept else None
    model = build_model(config, group.topology, torch.float32, CPU, group, form_of=form_of)
    load_weights(model.slots(), source, progress=False, device=CPU)
    return model, config


def write_llama(folder: Path, name: str, sizes: dict[str, Any] | None = None) -> transformers.PreTrainedModel:
    """Writes a checkpoint of that format; the model has its values."""
    torch.manual_seed(1)
    sizes = sizes or (WIDE if name in WIDE_FORMATS else SIZES)
    shape = transformers.LlamaConfig(**sizes, attn_implementation="eager")
    theirs = random_model(transformers.LlamaForCausalLM(shape))
    config = {"architectures": ["LlamaForCausalLM"], **sizes, "dtype": "float32", "rope_theta": 10000.0}
    values = write_quantised(folder, config, theirs.state_dict(), name)
    changed = max(float((values[key] - weight).abs().max()) for key, weight in theirs.state_dict().items())
    assert 1e-4 < changed < 0.2, "the packer has rounded, and not broken anything"
    theirs.load_state_dict(values)
    return theirs


@torch.inference_mode()
def compare(theirs: transformers.PreTrainedModel, ours: CausalLM) -> None:
    tokens = list(PROMPT)
    forward = Forward(ours)
    fresh = tokens
    for _ in range(NEW_TOKENS):
        found = forward.step({0: fresh})[0][-1]
        expected = theirs(torch.tensor([tokens])).logits[0, -1]
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        fresh = [int(expected.argmax())]
        assert int(found.argmax()) == fresh[0]
        tokens += fresh


@pytest.mark.parametrize("name", [*FORMATS, *WIDE_FORMATS])
def test_logits_are_those_of_the_values(name: str, tmp_path: Path) -> None:
    theirs = write_llama(tmp_path, name)
    compare(theirs, load(tmp_path)[0])


@pytest.mark.parametrize("name", ["w4a16", "w4a16-zeros", "w4a16-64", "awq", "gptq", *WIDE_FORMATS])
def test_four_bits_kept_as_they_are(name: str, tmp_path: Path) -> None:
    theirs = write_llama(tmp_path, name)
    model, _ = load(tmp_path, kept=True)
    kept = [slot for slot in model.slots() if slot.form is not None]
    size = 128 if name in WIDE_FORMATS else 64 if name == "w4a16-64" else 32
    assert {str(slot.form) for slot in kept} == {f"int4 in groups of {size}"}
    assert len(kept) == 2 * 7
    assert all(slot.nbytes < slot.target.numel() for slot in kept), "less than a byte each"
    compare(theirs, model)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel", "modelopt-fp8", "fp8-blocks"])
def test_eight_bits_kept_as_they_are(name: str, tmp_path: Path) -> None:
    """Activations are quantised too, so logits are near those of the values; the weights are the values. With blocks,
    a few rows are not quantised."""
    theirs = write_llama(tmp_path, name)
    model, _ = load(tmp_path, kept=True)
    kept = [slot for slot in model.slots() if slot.form is not None]
    form = "fp8 in groups of 128" if name == "fp8-blocks" else "fp8"
    assert {str(slot.form) for slot in kept} == {form} and len(kept) == 2 * 7
    source = SafetensorsSource([tmp_path / "model.safetensors"])
    for slot in kept:
        assert torch.equal(slot.target.float(), source.read(slot.name).float())
    if name == "fp8-blocks":
        compare(theirs, model)
    tokens = [*PROMPT, *PROMPT, 9]
    found, expected = Forward(model).step({0: tokens})[0], theirs(torch.tensor([tokens])).logits[0].detach()
    assert 1e-3 < float((found - expected).std() / expected.std()) < 0.15


@pytest.mark.parametrize("name", ["gptq-act-order", "int8", "gptq-8", "bnb-nf4", "mxfp4", "modelopt-nvfp4"])
def test_what_has_no_product_of_its_own_is_dequantised(name: str, tmp_path: Path) -> None:
    write_llama(tmp_path, name)
    assert not any(slot.form for slot in load(tmp_path, kept=True)[0].slots())


def on_two_ranks(
    folder: Path, values: Mapping[str, torch.Tensor], ep_size: int = 1
) -> Iterator[tuple[list[WeightSlot], torch.Tensor]]:
    """The slots of each rank's projections, and its logits. What is kept has been compared with the values."""

    def loaded(group: ThreadGroup) -> tuple[CausalLM, torch.Tensor]:
        model, _ = load(folder, kept=True, group=group)
        return model, Forward(model, topology=group.topology).step({0: PROMPT})[0]

    for model, logits in on_ranks(2, loaded, ep_size=ep_size):
        slots = [slot for slot in model.slots() if "_proj" in slot.name and slot.name.endswith("weight")]
        for slot in slots:
            if slot.form is not None:
                torch.testing.assert_close(held_values(slot), values[slot.name][slot.index], rtol=3e-7, atol=0)
        yield slots, logits


HALVES = {**SIZES, "intermediate_size": 512, "num_attention_heads": 16}  # of which two ranks have groups of 128


@pytest.mark.parametrize("name", ["w4a16", "w4a16-zeros", "w4a16-64", "awq", "gptq", "fp8-blocks", *WIDE_FORMATS])
def test_columns_of_two_ranks_stay_as_they_are(name: str, tmp_path: Path) -> None:
    theirs = write_llama(tmp_path, name, {**HALVES, "hidden_size": 256 if name in WIDE_FORMATS else 192})
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    for slots, logits in on_two_ranks(tmp_path, theirs.state_dict()):
        assert len(slots) == 2 * 7 and all(slot.form is not None for slot in slots)
        columns = [slot for slot in slots if slot.name.split(".")[-2] in ("o_proj", "down_proj")]
        assert all(slot.target.shape[1] == 256 for slot in columns)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", ["fp8-tensor", "fp8-channel", "modelopt-fp8"])
def test_columns_of_rows_with_one_scale(name: str, tmp_path: Path) -> None:
    """Ranks round their own activations, so logits are near."""
    theirs = write_llama(tmp_path, name)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    for slots, logits in on_two_ranks(tmp_path, theirs.state_dict()):
        assert len(slots) == 2 * 7 and all(slot.form is not None for slot in slots)
        assert 1e-3 < float((logits - expected).std() / expected.std()) < 0.15


@pytest.mark.parametrize(("name", "group"), [("w4a16-64", 64), ("fp8-blocks", 128)])
def test_columns_that_are_no_whole_groups_are_widened_and_named(
    name: str, group: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = write_llama(tmp_path, name)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    for slots, logits in on_two_ranks(tmp_path, theirs.state_dict()):
        plain = {slot.name.split(".")[-2] for slot in slots if slot.form is None}
        assert plain == {"o_proj", "down_proj"}
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    lines = [record.getMessage() for record in caplog.records if "dequantised" in record.getMessage()]
    why = f"this rank's inputs are no whole groups of {group} for 192 x"
    told = [
        f"{part}: {why} {size}; these weights are dequantised"
        for part, size in {"o_proj": 96, "down_proj": 160}.items()
    ]
    assert sorted(lines) == sorted(told * 2), "once on each rank, not for each layer"


def write_gpt_oss(tmp_path: Path) -> transformers.PreTrainedModel:
    """As its checkpoints have experts; the model has the values that transformers reads there."""
    torch.manual_seed(3)
    fields = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
    shape = transformers.GptOssConfig(**fields, attn_implementation="eager")
    theirs, held = random_model(transformers.GptOssForCausalLM(shape)), {}
    for name, weight in theirs.state_dict().items():
        held[name] = weight
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = weight.shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(121, 124, blocks.shape[:3], dtype=torch.uint8)
            weight.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
            held |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            del held[name]
    shape.architectures, shape.quantization_config = ["GptOssForCausalLM"], {"quant_method": "mxfp4"}
    shape.save_pretrained(tmp_path)
    save_file(held, tmp_path / "model.safetensors")
    return theirs


@pytest.mark.parametrize("kept", [False, True])
def test_experts_of_4_bit_floats(kept: bool, tmp_path: Path) -> None:
    theirs = write_gpt_oss(tmp_path)
    model, _ = load(tmp_path, kept)
    forms = [slot for slot in model.slots() if slot.form is not None]
    assert {str(slot.form) for slot in forms} == ({"fp4 in groups of 32"} if kept else set())
    assert len(forms) == (2 * 4 * 3 if kept else 0)
    assert all(slot.nbytes < slot.target.numel() for slot in forms), "less than a byte each"
    compare(theirs, model)


def test_experts_of_4_bit_floats_on_two_ranks(tmp_path: Path) -> None:
    theirs = write_gpt_oss(tmp_path)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    values = {}
    for name, weight in theirs.state_dict().items():
        if name.endswith(("gate_up_proj", "down_proj")):
            for expert, matrix in enumerate(weight.mT):
                prefix = f"{name.rpartition('.')[0]}.{expert}"
                if name.endswith("down_proj"):
                    values[f"{prefix}.down_proj.weight"] = matrix
                else:
                    values |= {f"{prefix}.gate_proj.weight": matrix[::2], f"{prefix}.up_proj.weight": matrix[1::2]}
    for slots, logits in on_two_ranks(tmp_path, values):
        experts = [slot for slot in slots if ".experts." in slot.name]
        assert len(experts) == 2 * 4 * 3 and all(slot.form is not None for slot in experts)
        assert all(slot.target.shape[1] == 160 for slot in experts if "down_proj" in slot.name)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


def test_without_a_product_for_them_eight_bits_are_dequantised(tmp_path: Path) -> None:
    write_llama(tmp_path, "fp8-channel")
    files = locate(str(tmp_path))
    source = open_source(files, read_config(files))
    assert kept_forms(source, fp8=True) is not None
    assert kept_forms(source, fp8=False) is None


def test_a_swap_needs_the_same_form(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_llama(tmp_path / "a", "w4a16")
    write_llama(tmp_path / "b", "fp8-channel")
    model, config = load(tmp_path / "a", kept=True)
    other = open_source(locate(str(tmp_path / "b")), config)
    with pytest.raises(
        ModelError, match=r"q_proj\.weight is kept as int4 in groups of 32, which the checkpoint does not"
    ):
        check_weights(list(model.slots()), other)


def test_weights_of_another_configuration_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path, "w4a16")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 320', '"intermediate_size": 384'))
    with pytest.raises(ModelError, match="the weights and the configuration do not belong together"):
        load(tmp_path, kept=True)


@pytest.mark.parametrize("experts", [False, True])
def test_mistrals_own_files(tmp_path: Path, experts: bool) -> None:
    """`params.json` and `consolidated.safetensors`, whose heads rotate neighbouring coordinates."""
    torch.manual_seed(2)
    plain = {**SIZES, "sliding_window": None, "attn_implementation": "eager"}
    if experts:
        mixture = transformers.MixtralConfig(**plain, num_local_experts=6, num_experts_per_tok=3)
        theirs = random_model(transformers.MixtralForCausalLM(mixture))
    else:
        theirs = random_model(transformers.MistralForCausalLM(transformers.MistralConfig(**plain)))
    names = {
        "model.embed_tokens": "tok_embeddings",
        "model.norm": "norm",
        "lm_head": "output",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.gate.": "feed_forward.gate.",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.layers": "layers",
    }
    held = {}
    for key, weight in theirs.state_dict().items():
        name, heads = key, {"q_proj": 6, "k_proj": 2}.get(key.split(".")[-2])
        for old, new in names.items():
            name = name.replace(old, new)
        if heads is not None:  # from halves to neighbours
            weight = weight.view(heads, 2, 16, -1).transpose(1, 2).reshape(weight.shape)
        if name.endswith("mlp.experts.gate_up_proj"):
            halves = zip(("w1", "w3"), weight.chunk(2, dim=1), strict=True)
        else:
            halves = [("w2", weight)] if name.endswith("mlp.experts.down_proj") else []  # type: ignore[assignment]
        module = name.partition(".mlp.")[0] + ".feed_forward.experts"
        parts = {f"{module}.{n}.{part}.weight": row for part, rows in halves for n, row in enumerate(rows)}
        held |= {key: part.contiguous() for key, part in (parts or {name: weight}).items()}
    save_file(held, tmp_path / "consolidated.safetensors")
    params: dict[str, Any] = {
        "dim": 192, "n_layers": 2, "head_dim": 32, "hidden_dim": 320, "n_heads": 6, "n_kv_heads": 2,
        "norm_eps": 1e-6, "vocab_size": 211, "rope_theta": 10000.0, "max_seq_len": 256,
    }  # fmt: skip
    if experts:
        params |= {"rope_theta": 1e6, "norm_eps": 1e-5, "moe": {"num_experts": 6, "num_experts_per_tok": 3}}
    (tmp_path / "params.json").write_text(json.dumps(params))
    model, config = load(tmp_path)
    assert (config.architecture, config.context_length, config.sliding_window) == (type(theirs).__name__, 256, None)
    compare(theirs, model)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"moe": {"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 1}}, "num_shared_experts is not"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "quantization is not supported"),
        ({"yarn": {"factor": 8.0}}, "yarn is not supported"),
    ],
)
def test_what_mistrals_own_files_say_and_is_not_read(tmp_path: Path, section: dict[str, Any], told: str) -> None:
    sizes = {"dim": 192, "n_layers": 2, "head_dim": 32, "hidden_dim": 320, "n_heads": 6, "n_kv_heads": 2}
    (tmp_path / "params.json").write_text(json.dumps({**sizes, "vocab_size": 211, "norm_eps": 1e-6, **section}))
    save_file({"norm.weight": torch.ones(192)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(ModelError, match=f"{told}.*use the model's Hugging Face files"):
        read_config(locate(str(tmp_path)))


@pytest.mark.parametrize("name", ["awq", *WIDE_FORMATS])
def test_four_bits_stay_so_for_the_native_kernels(name: str, tmp_path: Path) -> None:
    library = load_library()
    if library is None:
        pytest.skip("the CPU kernels are not compiled")
    theirs, files = write_llama(tmp_path, name), locate(str(tmp_path))
    config = read_config(files)
    native = NativeForward(library, config, open_source(files, config), quantization="auto")
    formats = {s.packing.weight.format for s in native.model.slots() if "_proj" in s.name and s.packing is not None}
    assert formats == {Packed.Q4 if name in ("w4a16-128", "gptq-128-symmetric") else Packed.Q4_MIN}
    expected = theirs(torch.tensor([PROMPT])).logits[0].detach()
    found = native.step({0: PROMPT})[0]
    assert float((found - expected).norm() / expected.norm()) < 0.03
