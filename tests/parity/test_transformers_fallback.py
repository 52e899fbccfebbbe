"""Models that run through transformers' own modules with our attention and cache: the same logits as transformers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import bough
from bough.core.control import Sleep, SwapWeights, Wake
from bough.core.errors import ModelError, SettingsError
from bough.core.settings import Settings
from bough.distributed.topology import Topology
from bough.executor.build import build_executor
from bough.loader.config import check_config, read_config
from bough.loader.load import load_weights, open_source
from bough.loader.locate import locate
from bough.models.registry import FALLBACK, build_model, find_family
from tests.fakes.forward import CPU, Forward
from tests.parity.engines import LocalEngine
from tests.parity.test_sliding_windows import NEW, expected
from tests.parity.test_tiny_checkpoints import SIZES, VOCAB, assert_same, prompt

WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
NO_HEAD_DIM = {name: value for name, value in SIZES.items() if name != "head_dim"}
OLD_NAMES = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512}

Make = Callable[[], transformers.PreTrainedConfig]
MODELS: dict[str, Make] = {
    "persimmon": lambda: transformers.PersimmonConfig(**NO_HEAD_DIM),  # query, key and value in one matrix
    "apertus": lambda: transformers.ApertusConfig(**NO_HEAD_DIM),  # an activation with weights
    "cohere": lambda: transformers.CohereConfig(**NO_HEAD_DIM, logit_scale=0.3),
    "granite": lambda: transformers.GraniteConfig(**NO_HEAD_DIM, logits_scaling=3.0, attention_multiplier=0.2),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **WINDOWS, final_logit_softcapping=3.0),
    "gpt-bigcode": lambda: transformers.GPTBigCodeConfig(**OLD_NAMES),  # one key head, learned positions
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4),  # joins experts when it loads
    "gpt-oss": lambda: transformers.GptOssConfig(**SIZES, **WINDOWS, num_local_experts=4),  # sinks
    "bert": lambda: transformers.BertConfig(**NO_HEAD_DIM, is_decoder=True),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **WINDOWS),
}
Saved = tuple[Path, transformers.PreTrainedModel]


def save(config: transformers.PreTrainedConfig, folder: Path, seed: int = 1) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.15)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=list(MODELS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save(MODELS[request.param](), folder)


@pytest.fixture
def persimmon(tmp_path: Path) -> Saved:
    return tmp_path, save(MODELS["persimmon"](), tmp_path)


@torch.inference_mode()
def truth_of(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def test_logits_of_uneven_chunks_and_decodes_of_two_rows(saved: Saved) -> None:
    files = locate(str(saved[0]))
    config = read_config(files, impl="transformers")
    model = build_model(config, Topology(), torch.float32, CPU)
    load_weights(model.slots(), open_source(files, config), progress=False, device=CPU)
    sequences = {0: prompt(40, seed=2), 3: prompt(23, seed=3)}
    truths = {row: truth_of(saved[1], tokens) for row, tokens in sequences.items()}
    forward = Forward(model)
    for step in ({0: 25}, {0: 1, 3: 9}, {3: 1, 0: 6}, {0: 1, 3: 1}, {0: 7, 3: 12}):
        cut = {row: slice(forward.lengths[row], forward.lengths[row] + count) for row, count in step.items()}
        results = forward.step({row: sequences[row][part] for row, part in cut.items()})
        for row, part in cut.items():
            assert_same(results[row], truths[row][part])


OLMOE = {**NO_HEAD_DIM, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "sizes", "setting"),
    [
        ("Olmo", NO_HEAD_DIM, {"clip_qkv": 0.5}),
        ("Llama", SIZES, {"hidden_act": "gelu"}),
        pytest.param("Olmoe", OLMOE, {"clip_qkv": 0.5}, marks=pytest.mark.slow),
        pytest.param("Phi", NO_HEAD_DIM, {"qk_layernorm": True}, marks=pytest.mark.slow),
        pytest.param("StableLm", NO_HEAD_DIM, {"qk_layernorm": True}, marks=pytest.mark.slow),
        pytest.param("Cohere", NO_HEAD_DIM, {"use_qk_norm": True}, marks=pytest.mark.slow),
        pytest.param("GPT2", OLD_NAMES, {"scale_attn_by_inverse_layer_idx": True}, marks=pytest.mark.slow),
    ],
)
def test_what_our_layers_refuse_runs_so(
    kind: str, sizes: dict[str, Any], setting: dict[str, Any], tmp_path: Path
) -> None:
    theirs = save(getattr(transformers, f"{kind}Config")(**sizes, **setting), tmp_path)
    with pytest.raises(ModelError, match=f"{next(iter(setting))} = .* is not supported; .*--model-impl transformers"):
        read_config(locate(str(tmp_path)))
    engine, tokens = LocalEngine(tmp_path, new=NEW, model_impl="transformers", max_total_tokens=400), prompt(20, seed=3)
    assert engine.ask(tokens)[0][0] == expected(theirs, tokens)


@pytest.mark.parametrize("name", ["persimmon", "gemma3"])
def test_requests_side_by_side_in_chunks_over_cached_prefixes(name: str, tmp_path: Path) -> None:
    theirs = save(MODELS[name](), tmp_path)
    engine = LocalEngine(tmp_path, new=NEW, model_impl="transformers", max_running_requests=3, max_total_tokens=2000)
    base = prompt(50, seed=5)
    prompts = [base, [*base[:30], 5, 6, 7]]
    truth = [expected(theirs, tokens) for tokens in prompts]
    assert [output for output, _ in engine.ask(*prompts)] == truth
    followed, cached = engine.ask([*base, *truth[0][:20]])[0]
    assert followed[: NEW - 20] == truth[0][20:]
    assert cached >= len(base)


def test_which_modules_compute() -> None:
    assert find_family("LlamaForCausalLM") is not FALLBACK
    assert find_family("LlamaForCausalLM", impl="sglang") is find_family("LlamaForCausalLM", impl="bough")
    assert find_family("LlamaForCausalLM", impl="transformers") is FALLBACK
    assert find_family("PersimmonForCausalLM") is FALLBACK
    with pytest.raises(ModelError, match="--model-impl transformers may run it"):
        find_family("PersimmonForCausalLM", impl="bough")
    for unknown in ("ElectraForMaskedLM", "NobodysForCausalLM"):
        with pytest.raises(ModelError, match=r"not supported(?!.*--model-impl)"):
            find_family(unknown)


def refusal(folder: Path, fields: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    check_config(locate(str(folder)), {}, "transformers")  # which knows too little to refuse
    with pytest.raises(ModelError) as raised:
        read_config(locate(str(folder)), impl="transformers")
    return str(raised.value)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (transformers.MambaConfig(num_hidden_layers=1, hidden_size=32), "keep a state"),
        (transformers.Lfm2Config(**NO_HEAD_DIM, layer_types=["conv", "full_attention", "conv"]), "convolutions"),
        (transformers.T5Config(num_layers=1), "no text decoder"),
        (transformers.Gemma3Config(text_config=SIZES), "more than a text decoder"),
        (transformers.DeepseekV3Config(num_hidden_layers=1), "differ in their number or width"),
        (transformers.BertConfig(**NO_HEAD_DIM), "neither causal nor a sliding window"),
        (transformers.BloomConfig(n_layer=1, hidden_size=64), "do not run with another attention"),
        (
            transformers.FalconConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=4),
            "another attention than",
        ),
        (transformers.FalconH1Config(num_hidden_layers=1), "keep a state"),
        (transformers.DiffLlamaConfig(**NO_HEAD_DIM), "more than once"),
        (
            transformers.LlamaConfig(
                **SIZES, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "rotation depends",
        ),
    ],
)
def test_what_needs_more_than_attention_is_refused(
    config: transformers.PreTrainedConfig, why: str, tmp_path: Path
) -> None:
    message = refusal(tmp_path, config.to_dict() | {"architectures": ["AnyForCausalLM"]})
    where, _, sentence = message.partition(": ")
    assert where == str(tmp_path / "config.json")
    assert sentence.startswith(("AnyForCausalLM cannot run", "the model cannot run")) and why in sentence
    assert sentence.endswith("; take a model of an architecture that `bough models --supported` lists.")


def test_a_model_type_that_transformers_do_not_know_is_refused(tmp_path: Path) -> None:
    assert "does not know the model type 'nobodys'" in refusal(tmp_path, {"model_type": "nobodys"})


@pytest.mark.parametrize("flag", [{"quantization": "int8"}, {"enable_deterministic_inference": True}])
def test_what_only_our_layers_do_is_refused(persimmon: Saved, flag: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="leave it out"):
        build_executor(locate(str(persimmon[0])), Settings.from_flat(flag))


def test_an_incomplete_checkpoint_is_refused(persimmon: Saved) -> None:
    overrides = json.dumps({"num_hidden_layers": 4})
    with pytest.raises(ModelError, match=r"lacks \d+ tensors"):
        LocalEngine(persimmon[0], new=NEW, json_model_override_args=overrides)


def test_random_weights(persimmon: Saved) -> None:
    engine = LocalEngine(persimmon[0], new=NEW, load_format="dummy", max_total_tokens=500)
    first = engine.ask(prompt(20, seed=1))[0][0]
    assert len(first) == NEW


def test_weights_can_be_released_and_swapped(persimmon: Saved, tmp_path: Path) -> None:
    folder = persimmon[0]
    other = tmp_path / "other"
    theirs = save(MODELS["persimmon"](), other, seed=2)
    path = other / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"transformers_version": "5.0.0", "eos_token_id": 7}))
    engine = LocalEngine(folder, new=NEW, max_total_tokens=500)
    tokens = prompt(20, seed=1)
    engine.executor.control(Sleep(("weights",))).wait()
    engine.executor.control(Wake(("weights",))).wait()
    assert engine.ask(tokens)[0][0] == expected(persimmon[1], tokens)
    engine.executor.control(SwapWeights(str(other))).wait()
    fresh = [3, *tokens]  # the old weights' prefixes are still cached
    assert engine.ask(fresh)[0][0] == expected(theirs, fresh)


@pytest.mark.slow
def test_an_engine_takes_it_by_itself(persimmon: Saved) -> None:
    folder, theirs = persimmon
    with bough.Engine(model_path=str(folder), skip_tokenizer_init=True, max_total_tokens=1000) as engine:
        tokens = prompt(20, seed=1)
        params = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
        outputs = engine.generate(input_ids=[tokens, tokens[:9]], sampling_params=params)
    made = [output["output_ids"] for output in outputs]
    assert made == [expected(theirs, tokens), expected(theirs, tokens[:9])]
