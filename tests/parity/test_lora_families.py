"""Adapters that PEFT makes for all linear layers of a family, its experts and its router: the same tokens as PEFT's.
What cannot be changed is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bough.core.plan import Executor
from bough.core.settings import LoraSettings
from tests.executor.test_executor_ranks import with_ranks
from tests.fakes.scheduler_bench import Bench
from tests.parity.engines import LocalEngine
from tests.parity.test_families import NEW, Model, make, prompt

peft: Any = pytest.importorskip("peft", reason="PEFT is not installed")
PROMPTS = [prompt(40, 3), prompt(5, 4), prompt(23, 5)]
SIZES = {
    "context_length": None, "page_size": 4, "max_total_tokens": 400, "max_running_requests": 8, "cpu_threads": 1,
    "dtype": "float32", "quantization": "none", "enable_lora": True,
}  # fmt: skip
BOTH = ("experts.gate_up_proj", "experts.down_proj")
# Families whose layers have names, orders or shapes of their own; and the parameters of modules that are not linear.
FAMILIES: dict[str, tuple[str, ...]] = {
    "gpt2": (),
    "gpt_neox": (),
    "phi3": (),
    "glm4": (),
    "qwen2_moe": (*BOTH, "gate.weight"),
    "qwen3_next": (*BOTH, "gate.weight"),
    "qwen3_5_moe_text": BOTH,
    "gemma4-experts": BOTH,
    "gemma4_text": (),
    "granitemoehybrid-dense": (),
    "lfm2_moe": BOTH,
    "glm4_moe_lite": (),
    "kimi_linear": (),
    "minimax_m2": (*BOTH, "gate.weight"),
}


def trained(model: Model, folder: Path, parameters: tuple[str, ...]) -> Any:
    which: dict[str, Any] = {"target_modules": "all-linear", "target_parameters": list(parameters) or None}
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **which)
    adapted = peft.get_peft_model(model.theirs, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in (each for name, each in adapted.named_parameters() if "lora_" in name):
            weight.normal_(0, 0.2)
    adapted.save_pretrained(folder)
    return adapted


@torch.inference_mode()
def continued(model: Any, tokens: list[int]) -> list[int]:
    known = list(tokens)
    for _ in range(NEW):
        known.append(int(model(torch.tensor([known]), use_cache=False).logits[0, -1].argmax()))
    return known[len(tokens) :]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_layers(tmp_path: Path, family: str) -> None:
    (tmp_path / "base").mkdir()
    model = make(family, tmp_path / "base")
    backend = {"device": "cpu", "attention_backend": "native" if model.native else "torch"}
    engine = LocalEngine(model.folder, new=NEW, **SIZES, **backend)
    assert engine.adapters is not None
    adapted = trained(model, tmp_path / "adapter", FAMILIES[family])
    engine.adapters.load("a", str(tmp_path / "adapter"))
    expected = [continued(adapted, tokens) for tokens in PROMPTS]
    with adapted.disable_adapter():
        plain = [continued(adapted, tokens) for tokens in PROMPTS]
    got = engine.ask(*PROMPTS, *PROMPTS, adapters=["a"] * len(PROMPTS) + [""] * len(PROMPTS))
    assert [output for output, _ in got] == expected + plain and expected != plain


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", "gemma4-experts"])
def test_two_ranks_give_the_same(tmp_path: Path, family: str) -> None:
    model = make(family, tmp_path / "base")
    trained(model, tmp_path / "adapters" / "a", FAMILIES[family])

    def tokens(ranks: Executor) -> list[list[int]]:
        bench = Bench(cast(Any, ranks), lora=LoraSettings(lora_resolver=str(tmp_path / "adapters")))
        for handle, given in enumerate(PROMPTS * 2):
            name = "a" * (handle < len(PROMPTS))
            bench.ask(handle, given, max_new_tokens=NEW, temperature=0.0, ignore_eos=True, adapter=name)
        while len(bench.out.ended) < 2 * len(PROMPTS):  # the adapter is read on a thread
            bench.turn()
        return [bench.out.outputs[handle] for handle in range(2 * len(PROMPTS))]

    flags = {"enable_lora": True, "max_total_tokens": 400, "attention_backend": "torch"}
    alone, together = (with_ranks(model.folder, size, tokens, 1, **flags) for size in (1, 2))
    assert together == alone and alone[: len(PROMPTS)] != alone[len(PROMPTS) :]
