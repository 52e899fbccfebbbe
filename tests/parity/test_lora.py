"""Requests with adapters get the tokens of a model whose weights have the adapter merged in; fp32, greedy."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
import transformers

from bough.client.embeds import embedded
from bough.core.errors import RequestError
from bough.messages.requests import LogprobRequest
from bough.native.library import instruction_sets, load_library
from tests.fakes.adapters import ATTENTION, EMBEDDING, EXPERTS, HEAD, LINEAR, ROUTER, merge, write_adapter
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.ranks import MODELS
from tests.parity.engines import LocalEngine
from tests.parity.gguf_writer import GgufWriter

NEW = 10
FLAGS = {"dtype": "float32", "attention_backend": "torch", "max_total_tokens": 4096}  # of models to compare with
ADAPTED = {"dtype": "float32", "max_total_tokens": 4096, "enable_lora": True}
LIBRARY = load_library()
SETS = [] if LIBRARY is None else instruction_sets(LIBRARY)
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
    base = write_checkpoint(folder / "base", 1, intermediate_size=288)  # more than the largest rank
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
    engine = LocalEngine(trained.base, new=NEW, **{**ADAPTED, **flags})
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
        {"max_loras_per_batch": 3, "attention_backend": "torch"},
        *({"max_loras_per_batch": 10, "cpu_instruction_set": name, "cpu_threads": 3} for name in SETS),
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
    engine = LocalEngine(base, new=NEW, **ADAPTED)
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
    engine = LocalEngine(base, new=NEW, **ADAPTED)
    merged = LocalEngine(merge(base, adapter, tmp_path / "merged"), new=NEW, **FLAGS)
    assert engine.adapters is not None
    engine.adapters.load("a", str(adapter))
    spec = LogprobRequest(start=0)
    engine.ask(PROMPTS[1], PROMPTS[0], adapters=["", "a"], logprobs=spec)
    merged.ask(PROMPTS[0], logprobs=spec)
    runs = [engine.out.started[1].input_logprobs, merged.out.started[0].input_logprobs]
    found, expected = (np.frombuffer(run.logprobs, dtype=np.float32) for run in runs if run is not None)
    assert len(found) == len(PROMPTS[0]) - 1 and found == pytest.approx(expected, abs=1e-4)


@pytest.mark.skipif(LIBRARY is None, reason="the CPU kernels are not compiled")
def test_vectors_in_the_place_of_tokens_have_nothing_of_the_embeddings_adapter(trained: Trained) -> None:
    given = embedded(np.random.default_rng(5).normal(size=(20, 64)) * 0.3)
    ids, found = given["ids"].tolist(), []
    for backend in ("native", "torch"):
        engine, names = engine_for(trained, attention_backend=backend), ["ends", "", "all", "ends"]
        got = engine.ask(ids, ids, ids, PROMPTS[1], adapters=names, media=[given["media"]] * 3 + [None])
        found.append([output for output, _ in got])
    assert found[0] == found[1] and found[0][3] == trained.expected["ends"][1]
    assert len(set(map(str, found[0][:3]))) == 3


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
    engine = LocalEngine(base, new=NEW, **ADAPTED)
    assert engine.adapters is not None
    engine.adapters.load("a", str(adapter))
    merged = outputs_of(LocalEngine(merge(base, adapter, tmp_path / "merged"), new=NEW, **FLAGS), PROMPTS)
    assert [engine.ask(prompt, adapters=["a"])[0][0] for prompt in PROMPTS] == merged != outputs_of(engine, PROMPTS)


OF_EXPERTS: dict[str, dict[str, object]] = {
    "one by one": {"modules": EXPERTS, "strength": 0.2},
    "some": {"modules": ("experts.1.down_proj", "experts.3.gate_proj"), "rank": 9},
    "fused": {"modules": (), "fused": True},
    "all": {"modules": (*ATTENTION, ROUTER), "fused": True, "rank": 20, "strength": 0.2},
    "router": {"modules": (ROUTER,)},
    "attention": {"modules": ATTENTION},
    "shared": {"modules": ("shared_experts.gate_proj", "shared_experts.down_proj")},
}


@pytest.mark.parametrize(("model", "kinds"), [("moe", tuple(OF_EXPERTS)[:-1]), ("latent", ("all", "shared"))])
def test_adapters_of_experts_and_none_in_one_batch(tmp_path: Path, model: str, kinds: tuple[str, ...]) -> None:
    base = write_checkpoint(tmp_path / "base", 1, **MODELS[model], max_position_embeddings=256)
    engine = LocalEngine(base, new=NEW, **ADAPTED)
    assert engine.adapters is not None
    expected = {"": outputs_of(LocalEngine(base, new=NEW, **FLAGS), PROMPTS)}
    for seed, name in enumerate(kinds):
        adapter = write_adapter(tmp_path / name, base, seed, **OF_EXPERTS[name])  # type: ignore[arg-type]
        engine.adapters.load(name, str(adapter))
        merged = LocalEngine(merge(base, adapter, tmp_path / f"{name}-merged"), new=NEW, **FLAGS)
        expected[name] = outputs_of(merged, PROMPTS)
    assert len({str(outputs) for outputs in expected.values()}) == len(expected), "all must differ"
    asked = [(name, turn) for turn in range(len(PROMPTS)) for name in expected]
    for spec in (None, LogprobRequest(start=0)):
        got = engine.ask(*(PROMPTS[turn] for _, turn in asked), adapters=[name for name, _ in asked], logprobs=spec)
        assert [output for output, _ in got] == [expected[name][turn] for name, turn in asked]


TINY = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
BOTH = ("experts.gate_up_proj", "experts.down_proj")
SMALL = {"moe_intermediate_size": 32, "num_experts": 8}
LATENT = {
    "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "num_key_value_heads": 4,
}  # fmt: skip
CHUNKED = {
    "num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [0, 1], "no_rope_layers": [1, 1], "head_dim": 16,
    "attention_chunk_size": 128, "intermediate_size_mlp": 96,
}  # fmt: skip
SHARED = ("shared_expert.up_proj", "shared_expert.gate_proj")
# Transformers' name of a configuration, what differs from TINY there, and what PEFT is told to change.
BY_PEFT: list[tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    ("Qwen3Moe", {**SMALL, "head_dim": 16}, (*BOTH, "gate.weight"), ("q_proj",)),
    ("Qwen3Moe", {**SMALL, "head_dim": 16}, BOTH[:1], ()),
    ("Qwen3Moe", {**SMALL, "head_dim": 16}, BOTH[1:], ()),
    (
        "Qwen2Moe",
        {**SMALL, "shared_expert_intermediate_size": 48},
        BOTH,
        ("shared_expert.up_proj", "shared_expert.gate_proj"),
    ),
    ("Mixtral", {"num_local_experts": 4}, (*BOTH, "gate.weight"), ("o_proj",)),
    ("DeepseekV3", LATENT, ("gate.weight",), EXPERTS),  # which PEFT turns to parameters of twice the rank
    ("GptOss", {"num_local_experts": 4, "intermediate_size": 32, "head_dim": 16}, BOTH, ()),
    ("GraniteMoe", {"num_local_experts": 4, "intermediate_size": 32}, BOTH, ()),
    (
        "Llama4Text",
        {**CHUNKED, "intermediate_size_mlp": 96, "head_dim": 16, "attention_chunk_size": 128},
        BOTH,
        ("q_proj",),
    ),
]


@pytest.mark.parametrize(("family", "sizes", "parameters", "modules"), BY_PEFT)
def test_peft_gives_the_same_tokens_where_it_changes_experts(
    tmp_path: Path, family: str, sizes: dict[str, Any], parameters: tuple[str, ...], modules: tuple[str, ...]
) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed; the other tests merge by hand")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.dim() > 1):
            parameter.normal_(0, 0.15)
    model.save_pretrained(tmp_path / "base")
    asked = {"target_parameters": list(parameters), "target_modules": list(modules)}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **asked))
    with torch.no_grad():
        for parameter in (each for name, each in adapted.named_parameters() if "lora_" in name):
            parameter.normal_(0, 0.25)
    adapted.save_pretrained(tmp_path / "adapter")
    engine = LocalEngine(tmp_path / "base", new=NEW, **ADAPTED)
    assert engine.adapters is not None
    engine.adapters.load("a", str(tmp_path / "adapter"))
    expected = [peft_tokens(adapted, prompt) for prompt in PROMPTS]
    with adapted.disable_adapter():
        plain = peft_tokens(adapted, PROMPTS[0])
    got = engine.ask(*PROMPTS, PROMPTS[0], adapters=["a"] * len(PROMPTS) + [""])
    assert [output for output, _ in got] == [*expected, plain] and plain != expected[0]


def peft_tokens(model: Any, prompt: list[int]) -> list[int]:
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    found: list[int] = model.generate(input_ids=torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    return found


@pytest.mark.parametrize("name", KINDS)
def test_peft_gives_the_same_tokens(trained: Trained, name: str) -> None:
    peft = pytest.importorskip("peft", reason="PEFT is not installed; the other tests merge by hand")
    base = transformers.AutoModelForCausalLM.from_pretrained(trained.base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, trained.adapters[name])
    assert [peft_tokens(model, prompt) for prompt in PROMPTS] == trained.expected[name]


def test_a_request_that_names_no_loaded_adapter_is_refused(trained: Trained) -> None:
    engine = engine_for(trained)
    assert engine.adapters is not None
    with pytest.raises(RequestError, match="no adapter 'absent'; loaded are: all, rank1"):
        engine.adapters.namespace("absent", "")


def input_logprobs(engine: LocalEngine, *names: str) -> list[np.ndarray[Any, Any]]:
    """Of a prompt with each adapter, all at once."""
    first = len(engine.out.outputs)
    engine.ask(*[PROMPTS[2]] * len(names), adapters=names if engine.adapters else (), logprobs=LogprobRequest(start=0))
    found = [engine.out.started[handle].input_logprobs for handle in range(first, first + len(names))]
    return [np.frombuffer(each.logprobs, dtype=np.float32) for each in found if each is not None]


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_bits_are_those_of_a_request_alone(trained: Trained, quantization: str, instructions: str) -> None:
    """Without an adapter, those of an engine that takes none."""
    flags = {"quantization": quantization, "cpu_instruction_set": instructions, "disable_radix_cache": True}
    engine, names = engine_for(trained, max_loras_per_batch=10, cpu_threads=3, **flags), ["", *KINDS]
    plain = LocalEngine(trained.base, new=NEW, dtype="float32", max_total_tokens=4096, **flags)
    alone = input_logprobs(plain, "") + [input_logprobs(engine, name)[0] for name in KINDS]
    together = input_logprobs(engine, *reversed(names))[::-1]
    assert [each.tobytes() for each in together] == [each.tobytes() for each in alone]
    assert engine.ask(PROMPTS[0], PROMPTS[0], adapters=["", "all"])[0] == plain.ask(PROMPTS[0])[0]


@pytest.mark.skipif(LIBRARY is None, reason="the CPU kernels are not compiled")
@pytest.mark.parametrize("stored", ["int8", "Q8_0", "F32"])
def test_quantised_weights_with_adapters_are_near_merged_ones(trained: Trained, tmp_path: Path, stored: str) -> None:
    """Of a GGUF file, too, which has the rows of queries and keys in another order."""
    if stored == "int8":
        engine = engine_for(trained, quantization=stored)
    else:
        kind = gguf.GGMLQuantizationType[stored]
        path = GgufWriter(trained.base, "LLAMA").write(tmp_path / "base.gguf", kind)
        engine = engine_for(trained._replace(base=path))
    for name in ("all", "rank256", "ends"):
        if stored == "F32":
            assert [engine.ask(prompt, adapters=[name])[0][0] for prompt in PROMPTS] == trained.expected[name]
            continue
        merged = LocalEngine(merge(trained.base, trained.adapters[name], tmp_path / name), new=NEW, **FLAGS)
        [found], [expected] = input_logprobs(engine, name), input_logprobs(merged, "")
        [plain] = input_logprobs(engine, "")
        assert np.abs(found - expected).mean() < 0.3 * np.abs(plain - expected).mean()
