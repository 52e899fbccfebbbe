"""What trainers ask of an engine on a GPU beside tokens, against Transformers in float32: hidden states, chosen experts
and vectors in the place of tokens; of some requests of a batch, with graphs for the others; and weights by handles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from bough import Engine
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.ranks import MOE
from tests.system.test_engine_trainers import GREEDY, PROMPTS, experts_of

pytestmark = pytest.mark.gpu
HEADS = {"head_dim": 32}  # which Triton's attention can multiply
OPTIONS = {"device": "cuda", "dtype": "float32", "skip_tokenizer_init": True, "max_total_tokens": 4096}
NEAR = {"atol": 2e-3, "rtol": 2e-3}
CLOSE = 1e-2  # logits of a router between which rounding may decide


def reference_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def continued(model: Any, **given: Any) -> list[int]:
    tokens: list[int] = model.generate(**given, max_new_tokens=12, do_sample=False, eos_token_id=-1)[0].tolist()
    return tokens


@pytest.mark.parametrize(
    "settings", [{}, {"chunked_prefill_size": 16, "page_size": 4}, {"speculative_algorithm": "NGRAM"}]
)
def test_hidden_states_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = write_checkpoint(tmp_path / "model", 1, **HEADS)
    model = reference_of(folder)
    with Engine(folder, enable_return_hidden_states=True, **OPTIONS, **settings) as engine:
        prompts, asked = PROMPTS * 2, [True, False, True] * 2
        for _ in range(2):  # again when graphs are captured
            found = engine.generate(input_ids=prompts, sampling_params=GREEDY, return_hidden_states=asked)
            for prompt, wanted, output in zip(prompts, asked, found, strict=True):
                ids = [*prompt, *output["output_ids"]]
                assert ids == continued(model, input_ids=torch.tensor([prompt]))
                assert ("hidden_states" in output["meta_info"]) == wanted
                if wanted:
                    states = output["meta_info"]["hidden_states"]
                    with torch.inference_mode():
                        expected = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1][0]
                    torch.testing.assert_close(torch.tensor([*states[0], *states[1:]]), expected, **NEAR)


def test_chosen_experts_are_those_of_transformers(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", 3, **{**MOE, **HEADS})
    model, per_token = reference_of(folder), MOE["num_experts_per_tok"]
    with Engine(folder, enable_return_routed_experts=True, **OPTIONS) as engine:
        asked = [True, False, True]
        found = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY, return_routed_experts=asked)
        for prompt, wanted, output in zip(PROMPTS, asked, found, strict=True):
            assert ("routed_experts" in output["meta_info"]) == wanted
            if not wanted:
                continue
            ids, layers = [*prompt, *output["output_ids"][:-1]], model.config.num_hidden_layers
            chosen = experts_of(output, layers, per_token)
            assert len(chosen) == len(ids)
            with torch.inference_mode():
                logits = torch.stack(model(torch.tensor([ids]), output_router_logits=True).router_logits, 1)
            best = logits.topk(per_token + 1)
            clear = (best.values[..., -2] - best.values[..., -1] > CLOSE).numpy()
            expected = np.sort(best.indices[..., :per_token].numpy(), -1)
            assert clear.mean() > 0.8 and np.array_equal(chosen[clear], expected[clear])


def test_vectors_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", 1, **HEADS)
    model = reference_of(folder)
    draw = torch.Generator().manual_seed(3)
    vectors = [torch.randn(count, model.config.hidden_size, generator=draw) * 0.3 for count in (5, 40)]
    with Engine(folder, chunked_prefill_size=16, **OPTIONS) as engine:
        found = engine.generate(input_embeds=[each.tolist() for each in vectors], sampling_params=GREEDY)
        for each, output in zip(vectors, found, strict=True):
            assert output["output_ids"] == continued(model, inputs_embeds=each[None])
        table = model.get_input_embeddings().weight.detach()
        plain = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
        alike = engine.generate(input_embeds=table[PROMPTS[0]].tolist(), sampling_params=GREEDY)
        assert alike["output_ids"] == plain["output_ids"] and alike["meta_info"]["cached_tokens"] == 0


def test_an_engine_takes_tensors_of_its_callers_gpu(tmp_path: Path) -> None:
    first, second = (write_checkpoint(tmp_path / name, seed, **HEADS) for seed, name in enumerate(("a", "b")))
    truth = [continued(reference_of(folder), input_ids=torch.tensor([PROMPTS[0]])) for folder in (first, second)]
    assert truth[0] != truth[1]
    with Engine(first, **OPTIONS) as engine:
        for folder, expected in ((None, truth[0]), (second, truth[1]), (first, truth[0])):
            if folder is not None:
                tensors = load_file(folder / "model.safetensors", device="cuda")
                updated = engine.update_weights_from_tensor(tensors, weight_version=folder.name)
                assert updated.success, updated.message
            output = engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
            assert [*PROMPTS[0], *output["output_ids"]] == expected
            assert folder is None or output["meta_info"]["weight_version"] == folder.name
