"""Mixtures of experts in quantised checkpoints: the logits that transformers computes from the values that they stand
for, dequantised, and with weights kept as a GPU keeps them, multiplied by the references and by interpreted kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bough.kernels.registry import fp8_ops_for
from bough.layers.weights import WeightSlot
from bough.messages.requests import LogprobRequest
from bough.models.base import CausalLM
from tests.fakes.forward import Forward
from tests.fakes.quantised import write_quantised
from tests.parity.engines import LocalEngine
from tests.parity.test_quantised_checkpoints import PROMPT, SIZES, compare, load, on_two_ranks

EXPERTS = {"moe_intermediate_size": 160, "num_experts_per_tok": 2, "initializer_range": 0.1}
DEEPSEEK = {
    **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")},
    **EXPERTS,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 144,
    "kv_lora_rank": 136,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 40,  # outputs take 160 inputs
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
}


NEMOTRON = {  # whose experts have no gates
    **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"},
    **EXPERTS,
    "layers_block_type": ["moe", "full_attention", "linear_attention", "moe"],
    "n_routed_experts": 5,
    "moe_shared_expert_intermediate_size": 320,
    "ssm_state_size": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
}


def make(family: str, **sizes: int) -> transformers.PreTrainedModel:
    if family == "deepseek_v3":
        return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DEEPSEEK | sizes))
    if family == "nemotron_h":
        return transformers.NemotronHForCausalLM(transformers.NemotronHConfig(**NEMOTRON | sizes))
    config = transformers.Qwen3MoeConfig(**SIZES | EXPERTS | sizes, num_experts=5, norm_topk_prob=True)
    return transformers.Qwen3MoeForCausalLM(config)


def write(folder: Path, family: str, name: str, only: str = "", **sizes: int) -> transformers.PreTrainedModel:
    """Writes a checkpoint of that format; the model has its values."""
    torch.manual_seed(1)
    theirs = make(family, **sizes).float().eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    plain = folder / "plain"
    theirs.save_pretrained(plain)
    config: dict[str, Any] = json.loads((plain / "config.json").read_text())
    values = write_quantised(folder, config, load_file(plain / "model.safetensors"), name, only)
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    made: transformers.PreTrainedModel = type(theirs).from_pretrained(plain, attn_implementation="eager").float().eval()
    return made


def kept(model: CausalLM) -> Iterator[WeightSlot]:
    return (slot for slot in model.slots() if slot.form is not None)


CASES = [
    ("qwen3_moe", "fp8-tensor", "experts."),
    ("qwen3_moe", "fp8-channel", "experts."),
    ("qwen3_moe", "fp8-blocks", ""),
    ("deepseek_v3", "fp8-blocks", ""),
    ("qwen3_moe", "gptq", "experts."),
    ("qwen3_moe", "awq", "experts."),
    ("deepseek_v3", "w4a16-zeros", "experts."),
]
FORMS = {"fp8-tensor": "fp8", "fp8-channel": "fp8", "fp8-blocks": "fp8 in groups of 128"}


@pytest.mark.parametrize(("family", "name", "only"), CASES)
def test_logits_are_those_of_the_values(family: str, name: str, only: str, tmp_path: Path) -> None:
    theirs = write(tmp_path, family, name, only)
    compare(theirs, load(tmp_path)[0])
    model, _ = load(tmp_path, kept=True)
    forms = {slot.name: str(slot.form) for slot in kept(model)}
    assert set(forms.values()) == {FORMS.get(name, "int4 in groups of 32")}
    matrices = {slot.name for slot in model.slots() if "_proj" in slot.name and only in slot.name}
    assert set(forms) == {name for name in matrices if "kv_b_proj" not in name}
    assert sum("experts." in name for name in forms) >= 15
    most = 1.1 if name in FORMS else 1.0  # bytes of a number, of which 160 take two blocks of 4 bits
    assert all(slot.nbytes < most * slot.target.numel() for slot in kept(model))
    compare(theirs, model)


@pytest.mark.parametrize("name", ["fp8-channel", "fp8-blocks", "gptq"])
def test_experts_without_gates_are_kept(name: str, tmp_path: Path) -> None:
    theirs = write(tmp_path, "nemotron_h", name, "mixer.experts.")
    compare(theirs, load(tmp_path)[0])
    model, _ = load(tmp_path, kept=True)
    assert sum("mixer.experts." in slot.name for slot in kept(model)) == 2 * 5 * 2
    compare(theirs, model)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name", "only"), [CASES[2], CASES[4], CASES[6]])
def test_experts_on_two_ranks_stay_as_they_are_kept(family: str, name: str, only: str, tmp_path: Path) -> None:
    theirs = write(tmp_path, family, name, only)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    values = load_file(tmp_path / "plain" / "model.safetensors")
    for slots, logits in on_two_ranks(tmp_path, values, ep_size=2):
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
        held = sum(".experts." in slot.name and slot.form is not None for slot in slots)
        assert held == (9 if family == "deepseek_v3" else 18)  # three experts, of one layer or of two


@pytest.mark.parametrize(
    ("family", "name", "only", "inner"),
    [(*CASES[1], 160), (*CASES[2], 256), (*CASES[2], 512), (*CASES[4], 192), (*CASES[5], 320), (*CASES[6], 128)],
)
def test_two_ranks_share_each_expert(family: str, name: str, only: str, inner: int, tmp_path: Path) -> None:
    """One block of 128 on each rank, or several; groups of 32."""
    theirs = write(tmp_path, family, name, only, moe_intermediate_size=inner)
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    values = load_file(tmp_path / "plain" / "model.safetensors")
    for slots, logits in on_two_ranks(tmp_path, values):
        kept = [slot for slot in slots if ".experts." in slot.name and slot.form is not None]
        assert len(kept) == (1 * 6 * 3 if family == "deepseek_v3" else 2 * 5 * 3)
        assert all(slot.target.shape[1] == inner // 2 for slot in kept if "down_proj" in slot.name)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


def test_experts_that_are_no_whole_groups_are_widened_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = write(tmp_path, *CASES[4])
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT])).logits[0]
    for slots, logits in on_two_ranks(tmp_path, {}):
        assert not any(slot.form for slot in slots)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
    line = "experts: this rank's inputs are no whole groups of 32 for 192 x 80; these weights are dequantised"
    assert [record.getMessage() for record in caplog.records].count(line) == 2, "once on each rank"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU interprets no kernels")
@pytest.mark.parametrize(
    ("family", "name", "only", "inner"),
    [(*CASES[1], 160), (*CASES[2], 128), (*CASES[3], 160), (*CASES[4], 160)],  # one whole block, as on a rank
)
def test_kernels_of_gpus_give_the_same(
    family: str, name: str, only: str, inner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bough.kernels.triton_ops import TRITON

    theirs = write(tmp_path, family, name, only, moe_intermediate_size=inner)
    plain, _ = load(tmp_path, kept=True)
    monkeypatch.setattr("bough.kernels.registry.ops_for", lambda device, deterministic: TRITON)
    monkeypatch.setattr("bough.layers.schemes.stored.fp8_ops_for", lambda device: fp8_ops_for(torch.device("cuda")))
    model, _ = load(tmp_path, kept=True)
    tokens = [*PROMPT, 101]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens])).logits[0]
    forward = Forward(model)
    found = torch.cat([forward.step({0: part})[0] for part in (tokens[:6], tokens[6:8], tokens[8:])])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)  # so few rows are not quantised
    if name == "fp8-blocks":
        tokens = [*PROMPT, *PROMPT, 3]
        found, expected = (Forward(each).step({0: tokens})[0] for each in (model, plain))
        assert float((found - expected).norm() / expected.norm()) < 0.02  # some values are rounded to the other side


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "name", "only"), CASES)
@pytest.mark.parametrize("chunk", [16, 256])  # of which the first is never quantised
def test_an_engine_on_a_gpu_keeps_them(family: str, name: str, only: str, chunk: int, tmp_path: Path) -> None:
    """With graphs for decoding. Far from the middle a choice of experts may differ, in bfloat16."""
    theirs = write(tmp_path, family, name, only)
    backend = "torch" if family == "deepseek_v3" else "triton"
    flags = {"device": "cuda", "attention_backend": backend, "max_total_tokens": 1024, "chunked_prefill_size": chunk}
    engine = LocalEngine(tmp_path, new=24, max_running_requests=4, **flags)
    prompt = PROMPT * 4
    output, _ = engine.ask(prompt, logprobs=LogprobRequest())[0]
    with torch.inference_mode():
        expected = theirs(torch.tensor([[*prompt, *output]])).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
    scores = torch.tensor(engine.out.scores[0])
    differences = (scores - expected.gather(1, torch.tensor(output)[:, None])[:, 0]).abs()
    assert float(differences.median()) < (0.1 if chunk == 16 else 0.4)
