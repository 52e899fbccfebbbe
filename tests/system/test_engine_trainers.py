"""What trainers ask of an engine beside tokens, against Transformers: sessions, hidden states and chosen experts."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from bough import Engine
from bough.core.errors import RequestError, SettingsError
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.native import NATIVE
from tests.fakes.ranks import LATENT, MOE

GREEDY = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
PROMPTS = [[5, 9, 17, 33, 2, 64, 90], [7] * 40, [5, 9, 17, 33, 3]]
MIXTURE = {"skip_tokenizer_init": True, "cpu_threads": 1, "enable_return_routed_experts": True}
OPTIONS = {"skip_tokenizer_init": True, "cpu_threads": 1, "enable_return_hidden_states": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), 1)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder, max_total_tokens=4096, **OPTIONS) as started:
        yield started


def compare(reference: Any, prompt: list[int], output: dict[str, Any]) -> None:
    """One entry with the prompt's states, then one for each token that a step has read."""
    states = output["meta_info"]["hidden_states"]
    ids = [*prompt, *output["output_ids"][:-1]]
    assert len(states[0]) == len(prompt) and len(states) == max(1, len(output["output_ids"]))
    with torch.inference_mode():
        expected = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(torch.tensor([*states[0], *states[1:]]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention_backend": "torch"},
        {"chunked_prefill_size": 16, "page_size": 4},
        {"speculative_algorithm": "NGRAM"},
        {"max_total_tokens": 80, "schedule_conservativeness": 0.0},  # retracts
        {"disable_overlap_schedule": True, "enable_mixed_chunk": False},
    ],
    ids=lambda settings: " ".join(settings) or "native",
)
def test_hidden_states_are_those_of_transformers(folder: Path, reference: Any, settings: dict[str, Any]) -> None:
    retracts = "schedule_conservativeness" in settings
    with Engine(folder, **{"max_total_tokens": 4096, **OPTIONS, **settings}) as engine:
        prompts = PROMPTS * 2
        first = engine.generate(input_ids=prompts, sampling_params=GREEDY, return_hidden_states=True)
        for prompt, output in zip(prompts, first, strict=True):
            assert output["meta_info"]["cached_tokens"] == 0
            compare(reference, prompt, output)
        assert any(output["meta_info"]["num_retractions"] for output in first) == retracts
        (plain,) = engine.generate(input_ids=PROMPTS[:1], sampling_params=GREEDY)
        assert plain["output_ids"] == first[0]["output_ids"] and "hidden_states" not in plain["meta_info"]
        assert plain["meta_info"]["cached_tokens"] > 0  # those with states leave prefixes to others


def test_hidden_states_of_a_prompt_alone_of_some_in_a_batch_and_at_the_end_of_a_stream(
    engine: Engine, reference: Any
) -> None:
    alone = engine.generate(input_ids=PROMPTS[0], sampling_params={"max_new_tokens": 0}, return_hidden_states=True)
    assert alone["output_ids"] == []
    compare(reference, PROMPTS[0], {**alone, "output_ids": []})
    mixed = engine.generate(input_ids=PROMPTS[:2], sampling_params=GREEDY, return_hidden_states=[False, True])
    assert "hidden_states" not in mixed[0]["meta_info"]
    compare(reference, PROMPTS[1], mixed[1])
    *early, last = engine.generate(input_ids=PROMPTS[2], sampling_params=GREEDY, return_hidden_states=True, stream=True)
    assert early and not any("hidden_states" in event["meta_info"] for event in early)
    compare(reference, PROMPTS[2], last)


def test_scores_for_callers_with_a_loop_of_their_own(engine: Engine) -> None:
    asked = [1, 2], [[3], [4, 5]], [6, 7]
    np.testing.assert_allclose(asyncio.run(engine.async_score(*asked)), engine.score(*asked), rtol=1e-5)
    with pytest.raises(RequestError, match="tokenizer"):
        asyncio.run(engine.async_rerank("a", ["b"]))


def test_the_first_version_of_the_weights_and_that_of_an_answer_that_is_kept_over_an_update(folder: Path) -> None:
    options = {"skip_tokenizer_init": True, "cpu_threads": 1, "max_total_tokens": 4096, "weight_version": "7"}
    whole = {"input_ids": [5, 9, 17], "sampling_params": {**GREEDY, "max_new_tokens": 400}}
    with Engine(folder, **options) as engine:
        expected = engine.generate(**whole)
        assert expected["meta_info"]["weight_version"] == engine.get_model_info()["weight_version"] == "7"
        stream = engine.generate(**whole, stream=True)
        next(stream)
        engine.pause_generation("in_place")
        assert engine.update_weights_from_disk(folder, flush_cache=False, weight_version="8").num_paused_requests == 1
        engine.continue_generation()
        *_, last = stream
        assert last["output_ids"] == expected["output_ids"] and last["meta_info"]["weight_version"] == "8"
        for wrong in (0, -1.0, float("nan")):
            with pytest.raises(RequestError, match="timeout must be more than 0"):
                engine.open_session(1000, timeout=wrong)


def test_a_session_goes_on_behind_its_requests(engine: Engine, reference: Any) -> None:
    with pytest.raises(RequestError, match="streaming"):
        engine.open_session(1000, streaming=True)
    session = engine.open_session(1000, streaming=False, timeout=None)
    first = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, session_params={"id": session})
    params = {"id": session, "rid": first["meta_info"]["id"]}
    engine.generate(input_ids=[[token] * 30 for token in range(100)], sampling_params=GREEDY)
    second = engine.generate(input_ids=[11, 12], sampling_params=GREEDY, session_params=params)
    whole = [*PROMPTS[0], *first["output_ids"], 11, 12]
    assert second["meta_info"]["prompt_tokens"] == len(whole)
    assert second["meta_info"]["cached_tokens"] == len(whole) - 3
    ids = reference.generate(torch.tensor([whole]), max_new_tokens=12, do_sample=False, eos_token_id=-1)
    assert second["output_ids"] == ids[0, len(whole) :].tolist()
    states = engine.generate(
        input_ids=[11, 12], sampling_params=GREEDY, session_params=params, return_hidden_states=True
    )
    compare(reference, whole, states)
    engine.close_session(session)
    with pytest.raises(RequestError, match="not open"):
        engine.generate(input_ids=[1], session_params=params)
    with pytest.raises(RequestError, match="not open"):
        engine.close_session(session)


def test_without_the_flag_hidden_states_are_refused(folder: Path) -> None:
    options = OPTIONS | {"enable_return_hidden_states": False}
    with (
        Engine(folder, max_total_tokens=512, **options) as engine,
        pytest.raises(RequestError, match="--enable-return-hidden-states"),
    ):
        engine.generate(input_ids=PROMPTS[0], return_hidden_states=True)


def experts_of(output: dict[str, Any], layers: int, per_token: int) -> np.ndarray:
    """[tokens, layers, experts of a token], in the order of their numbers."""
    content = base64.b64decode(output["meta_info"]["routed_experts"], validate=True)
    return np.sort(np.frombuffer(content, dtype=np.int32).reshape(-1, layers, per_token), -1)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunked_prefill_size": 16, "page_size": 4},
        {"speculative_algorithm": "NGRAM"},
        {"max_total_tokens": 80, "schedule_conservativeness": 0.0},  # retracts
        pytest.param({"tp_size": 2}, marks=pytest.mark.slow),
        pytest.param({"tp_size": 2, "ep_size": 2, "moe_a2a_backend": "torch"}, marks=pytest.mark.slow),
    ],
    ids=lambda settings: " ".join(settings) or "plain",
)
def test_chosen_experts_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    mixture = write_checkpoint(tmp_path / "moe", 3, **MOE)
    reference = transformers.AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    with Engine(mixture, **{"max_total_tokens": 4096, **MIXTURE, **settings}) as engine:
        prompts = PROMPTS * 2
        outputs = engine.generate(input_ids=prompts, sampling_params=GREEDY, return_routed_experts=True)
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = [*prompt, *output["output_ids"][:-1]]
            with torch.inference_mode():
                logits = reference(torch.tensor([ids]), output_router_logits=True).router_logits
            chosen = torch.stack([layer.topk(MOE["num_experts_per_tok"]).indices for layer in logits], 1)
            assert np.array_equal(experts_of(output, len(logits), 2), chosen.sort(-1).values.numpy())
        *early, last = engine.generate(
            input_ids=PROMPTS[0], sampling_params=GREEDY, return_routed_experts=True, stream=True
        )
        assert early and not any("routed_experts" in event["meta_info"] for event in early)
        assert last["meta_info"]["routed_experts"] == outputs[0]["meta_info"]["routed_experts"]
        mixed = engine.generate(input_ids=PROMPTS[:2], sampling_params=GREEDY, return_routed_experts=[False, True])
        assert "routed_experts" not in mixed[0]["meta_info"] and mixed[0]["output_ids"] == outputs[0]["output_ids"]
        assert mixed[1]["meta_info"]["routed_experts"] == outputs[1]["meta_info"]["routed_experts"]
        later = {"return_routed_experts": True, "routed_experts_start_len": [4, 40]}
        cut = engine.generate(input_ids=PROMPTS[:2], sampling_params=GREEDY, **later)
        for output, whole, start in zip(cut, outputs[:2], later["routed_experts_start_len"], strict=True):
            parts = [experts_of(each, len(logits), 2) for each in (output, whole)]
            assert np.array_equal(parts[0], parts[1][start:]) and len(parts[0])


def test_layers_without_experts_have_zeros(tmp_path: Path) -> None:
    mixture = write_checkpoint(tmp_path / "latent", 3, **LATENT)
    with Engine(mixture, max_total_tokens=2048, **MIXTURE) as engine:
        output = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY, return_routed_experts=True)
        chosen = experts_of(output, 2, LATENT["num_experts_per_tok"])
        assert len(chosen) == len(PROMPTS[0]) + len(output["output_ids"]) - 1 and not chosen[:, 0].any()
        assert (np.diff(chosen[:, 1]) > 0).all() and chosen.max() < LATENT["n_routed_experts"]
        with pytest.raises(RequestError, match="cannot be had at once"):
            engine.generate(input_ids=PROMPTS[0], return_routed_experts=True, return_hidden_states=True)


def test_models_without_experts_and_engines_without_the_flag_refuse(engine: Engine, folder: Path) -> None:
    with pytest.raises(RequestError, match="needs an engine that was started with --enable-return-routed-experts"):
        engine.generate(input_ids=PROMPTS[0], return_routed_experts=True)
    with pytest.raises(SettingsError, match="is for models with experts"):
        Engine(folder, max_total_tokens=512, **MIXTURE)
    with pytest.raises(SettingsError, match="leave out --pp-size"):
        Engine(folder, max_total_tokens=512, pp_size=2, **MIXTURE)


@pytest.mark.parametrize("backend", [NATIVE, "torch"])
def test_vectors_in_the_place_of_tokens_are_read_as_transformers_reads_them(
    folder: Path, reference: Any, backend: str
) -> None:
    table = reference.get_input_embeddings().weight.detach()
    draw = torch.Generator().manual_seed(3)
    strange = [torch.randn(count, table.shape[1], generator=draw) * 0.3 for count in (5, 40, 5)]
    settings = {"attention_backend": backend, "chunked_prefill_size": 16, "max_total_tokens": 2048}
    with Engine(folder, **OPTIONS, **settings) as engine:
        for vectors in (strange, [torch.cat([strange[0], strange[2]])]):
            given: Any = [each.tolist() for each in vectors] if len(vectors) > 1 else vectors[0].numpy()
            found = engine.generate(input_embeds=given, sampling_params=GREEDY)
            for each, output in zip(vectors, found if len(vectors) > 1 else [found], strict=True):
                expected = reference.generate(
                    inputs_embeds=each[None], max_new_tokens=12, do_sample=False, eos_token_id=-1
                )
                assert output["output_ids"] == expected[0].tolist()
                assert output["meta_info"]["prompt_tokens"] == len(each)
        # The second prompt began with the first one's vectors, but items are shared whole; itself it finds again.
        assert found["meta_info"]["cached_tokens"] == 0
        again = engine.generate(input_embeds=given, sampling_params=GREEDY, return_hidden_states=False)
        assert again["meta_info"]["cached_tokens"] == 9 and again["output_ids"] == found["output_ids"]
        # A token's own vector says what the token says, and is another prompt to the cache.
        plain = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        alike = engine.generate(input_embeds=table[PROMPTS[0]].tolist(), sampling_params=GREEDY)
        assert alike["output_ids"] == plain["output_ids"] and alike["meta_info"]["cached_tokens"] == 0
        for wrong, words in (
            ([[0.0] * 7], "64"),
            ([[0.0], [0.0, 1.0]], "one length"),
            ([[float("nan")] * 64], "finite"),
            ([], "list of vectors"),
            ("abc", "list of vectors"),
        ):
            with pytest.raises(RequestError, match=words) as caught:
                engine.generate(input_embeds=wrong, sampling_params=GREEDY)
            assert caught.value.field == "input_embeds"
        with pytest.raises(RequestError, match="exactly one"):
            engine.generate("text", input_embeds=given)
