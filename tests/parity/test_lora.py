"""Requests with adapters get the tokens of a model whose weights have the adapter merged in; fp32, greedy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers

from bough.core.errors import RequestError, SettingsError
from bough.messages.requests import LogprobRequest
from tests.fakes.adapters import ATTENTION, EMBEDDING, HEAD, LINEAR, merge, write_adapter
from tests.fakes.checkpoints import write_checkpoint
from tests.parity.engines import LocalEngine

NEW = 10
FLAGS = {"dtype": "float32", "attention_backend": "torch", "max_total_tokens": 4096}
# Rank, modules and the rest of the configuration of each.
KINDS: dict[str, dict[str, object]] = {
    "all": {},
    "rank1": {"rank": 1},
    "rank256": {"rank": 256, "strength": 0.05},
    "stabilised": {"rank": 9, "use_rslora": True, "strength": 0.15},
    "attention": {"modules": ATTENTION},
    "query": {"modules": ATTENTION[:1]},
    "mlp": {"modules": LINEAR[4:]},
    "down": {"modules": LINEAR[-1:], "lora_alpha": 1},
    "last": {"layers": (1,)},
    "ends": {"modules": (EMBEDDING, HEAD)},
}


class Trained(NamedTuple):
    base: Path
    adapters: dict[str, Path]
    expected: dict[str, list[list[int]]]  # by name, the outputs for PROMPTS; of the model itself under ""


def prompts_of(count: int) -> list[list[int]]:
    """They begin alike, so that cached prefixes of one would serve the next; longer than a chunk."""
    draw = random.Random(3)
    common = [draw.randrange(3, 120) for _ in range(20)]
    return [common + [draw.randrange(3, 120) for _ in range(5 + 3 * n)] for n in range(count)]


PROMPTS = prompts_of(3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("lora")
    base = write_checkpoint(folder / "base", 1)
    adapters = {
        name: write_adapter(folder / name, base, seed, **options)  # type: ignore[arg-type]
        for seed, (name, options) in enumerate(KINDS.items())
    }
    merged = {"": base, **{name: merge(base, path, folder / f"{name}-merged") for name, path in adapters.items()}}
    expected = {name: outputs_of(LocalEngine(path, new=NEW, **FLAGS), PROMPTS) for name, path in merged.items()}
    assert len({tuple(map(tuple, outputs)) for outputs in expected.values()}) == len(expected), "all must differ"
    return Trained(base, adapters, expected)


def outputs_of(engine: LocalEngine, prompts: list[list[int]]) -> list[list[int]]:
    return [output for prompt in prompts for output, _ in engine.ask(prompt)]


def engine_for(trained: Trained, **flags: object) -> LocalEngine:
    engine = LocalEngine(trained.base, new=NEW, **{**FLAGS, "enable_lora": True, **flags})
    assert engine.adapters is not None
    for name, path in trained.adapters.items():
        engine.adapters.load(name, str(path))
    return engine


@pytest.mark.parametrize("name", ["", *KINDS])
def test_alone(trained: Trained, name: str) -> None:
    engine = engine_for(trained)
    assert [engine.ask(prompt, adapters=[name])[0][0] for prompt in PROMPTS] == trained.expected[name]


@pytest.mark.parametrize(
    "flags",
    [
        {"max_loras_per_batch": 10},
        {"max_loras_per_batch": 2},
        {"max_loras_per_batch": 10, "page_size": 4, "enable_mixed_chunk": False},
        {"max_loras_per_batch": 3, "speculative_algorithm": "NGRAM"},
        {"max_loras_per_batch": 10, "disable_radix_cache": True, "disable_overlap_schedule": True},
    ],
    ids=str,
)
def test_all_adapters_and_none_in_one_batch(trained: Trained, flags: dict[str, object]) -> None:
    engine = engine_for(trained, **flags)
    names = ["", *KINDS] * len(PROMPTS)
    random.Random(1).shuffle(names)
    turns = dict.fromkeys(names, 0)
    asked = []
    for name in names:
        asked.append((name, turns[name]))
        turns[name] += 1
    for _ in range(2):  # the second time prefixes are cached
        got = engine.ask(*(PROMPTS[turn] for _, turn in asked), adapters=names)
        assert [output for output, _ in got] == [trained.expected[name][turn] for name, turn in asked]


def test_cached_prefixes_are_those_of_the_same_adapter(trained: Trained) -> None:
    engine = engine_for(trained)
    first, second = PROMPTS[:2]
    for name in ("", "all", "mlp"):
        assert engine.ask(first, adapters=[name])[0][1] == 0
    for name in ("all", "mlp", ""):
        output, cached = engine.ask(second, adapters=[name])[0]
        assert cached == 20 and output == trained.expected[name][1]


def test_another_adapter_under_the_same_name_finds_nothing_of_the_first(trained: Trained) -> None:
    engine = engine_for(trained)
    assert engine.adapters is not None
    engine.ask(PROMPTS[0], adapters=["all"])
    engine.adapters.unload("all")
    engine.adapters.load("all", str(trained.adapters["query"]))
    assert engine.ask(PROMPTS[0], adapters=["all"]) == [(trained.expected["query"][0], 0)]


def test_retracted_requests_go_on_with_their_adapter(trained: Trained) -> None:
    engine = engine_for(trained, max_total_tokens=90, max_loras_per_batch=2, schedule_conservativeness=0.0)
    names = ["all", "mlp", "", "query", "all", "mlp"]
    got = engine.ask(*[PROMPTS[0]] * len(names), adapters=names)
    assert [output for output, _ in got] == [trained.expected[name][0] for name in names]
    assert engine.scheduler._planner.retraction.retracted > 0


def test_prompt_logprobs_are_those_of_the_adapter(trained: Trained) -> None:
    """All rows of the last layer are computed then."""
    engine, spec = engine_for(trained), LogprobRequest(start=0)
    got = engine.ask(PROMPTS[0], PROMPTS[0], PROMPTS[1], adapters=["all", "", "mlp"], logprobs=spec)
    expected = (trained.expected["all"][0], trained.expected[""][0], trained.expected["mlp"][1])
    assert tuple(output for output, _ in got) == expected


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_of_the_embedding_and_of_the_head(tmp_path: Path, tied: bool) -> None:
    """Beside one of linear layers and none; a tied head is changed apart from the embedding."""
    base, names = write_checkpoint(tmp_path / "base", 1, tie_word_embeddings=tied), ["embedding", "head", "ends", "q"]
    engine = LocalEngine(base, new=NEW, **{**FLAGS, "enable_lora": True})
    assert engine.adapters is not None
    expected, kinds = {"": outputs_of(engine, PROMPTS)}, [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD, *LINEAR), LINEAR[:1]]
    for seed, (name, modules) in enumerate(zip(names, kinds, strict=True)):
        adapter = write_adapter(tmp_path / name, base, seed, modules=modules)
        engine.adapters.load(name, str(adapter))
        merged = LocalEngine(merge(base, adapter, tmp_path / f"{name}-merged"), new=NEW, **FLAGS)
        expected[name] = outputs_of(merged, PROMPTS)
    assert len({str(outputs) for outputs in expected.values()}) == len(expected)
    asked = [(name, turn) for name in expected for turn in range(len(PROMPTS))]
    for spec in (None, LogprobRequest(start=0)):
        got = engine.ask(*(PROMPTS[turn] for _, turn in asked), adapters=[name for name, _ in asked], logprobs=spec)
        assert [output for output, _ in got] == [expected[name][turn] for name, turn in asked]


def test_prompt_logprobs_are_those_of_the_adapters_head(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", 1)
    adapter = write_adapter(tmp_path / "a", base, 4, modules=(EMBEDDING, HEAD))
    engine = LocalEngine(base, new=NEW, **{**FLAGS, "enable_lora": True})
    merged = LocalEngine(merge(base, adapter, tmp_path / "merged"), new=NEW, **FLAGS)
    assert engine.adapters is not None
    engine.adapters.load("a", str(adapter))
    spec = LogprobRequest(start=0)
    engine.ask(PROMPTS[1], PROMPTS[0], adapters=["", "a"], logprobs=spec)
    merged.ask(PROMPTS[0], logprobs=spec)
    runs = [engine.out.started[1].input_logprobs, merged.out.started[0].input_logprobs]
    found, expected = (np.frombuffer(run.logprobs, dtype=np.float32) for run in runs if run is not None)
    assert len(found) == len(PROMPTS[0]) - 1 and found == pytest.approx(expected, abs=1e-4)


def test_an_adapter_of_fused_modules(tmp_path: Path) -> None:
    """Phi-3 has q, k and v in one matrix, and gate and up; one pair of thin matrices changes all of it."""
    config = transformers.Phi3Config(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    base = tmp_path / "base"
    transformers.Phi3ForCausalLM(config).save_pretrained(base)
    modules = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    adapter = write_adapter(tmp_path / "adapter", base, 5, modules=modules)
    engine = LocalEngine(base, new=NEW, **{**FLAGS, "enable_lora": True})
    assert engine.adapters is not None
    engine.adapters.load("a", str(adapter))
    merged = outputs_of(LocalEngine(merge(base, adapter, tmp_path / "merged"), new=NEW, **FLAGS), PROMPTS)
    assert [engine.ask(prompt, adapters=["a"])[0][0] for prompt in PROMPTS] == merged != outputs_of(engine, PROMPTS)


@pytest.mark.parametrize("name", KINDS)
def test_peft_gives_the_same_tokens(trained: Trained, name: str) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed; the other tests merge by hand")
    base = transformers.AutoModelForCausalLM.from_pretrained(trained.base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, trained.adapters[name])
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    for prompt, expected in zip(PROMPTS, trained.expected[name], strict=True):
        model.generation_config.eos_token_id = None
        got = model.generate(input_ids=torch.tensor([prompt]), **options)
        assert got[0, len(prompt) :].tolist() == expected


def test_a_request_that_names_no_loaded_adapter_is_refused(trained: Trained) -> None:
    engine = engine_for(trained)
    assert engine.adapters is not None
    with pytest.raises(RequestError, match="no adapter 'absent'; loaded are: all, rank1"):
        engine.adapters.namespace("absent", "")


def test_native_kernels_refuse_adapters(trained: Trained) -> None:
    with pytest.raises(SettingsError, match="do not apply adapters"):
        LocalEngine(trained.base, new=1, enable_lora=True, attention_backend="native")
    with pytest.raises(SettingsError, match="do not apply adapters"):
        LocalEngine(trained.base, new=1, enable_lora=True, quantization="int8")
