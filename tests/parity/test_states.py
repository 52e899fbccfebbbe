"""Models with recurrent layers through scheduler and executor: what comes out is what transformers generate, whether a
state was copied, a row was retracted, or prompts and decodes shared steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.parity.engines import LocalEngine
from tests.parity.test_families import make

NEW = 24
FLAGS = {"attention_backend": "torch", "cpu_threads": 1, "dtype": "float32", "max_running_requests": 4}


@pytest.fixture(scope="module", params=["qwen3_5_text", "nemotron_h"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, transformers.PreTrainedModel]:
    made = make(request.param, tmp_path_factory.mktemp(request.param))
    return made.folder, made.theirs


def draw(length: int, seed: int) -> list[int]:
    return torch.randint(3, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def expected(theirs: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    made = theirs.generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return made[0, len(prompt) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, {"page_size": 4}, {"enable_mixed_chunk": True}, {"disable_radix_cache": True}])
def test_rows_beside_each_other_keep_their_states(
    model: tuple[Path, transformers.PreTrainedModel], flags: dict[str, object]
) -> None:
    folder, theirs = model
    engine = LocalEngine(folder, new=NEW, max_total_tokens=2000, **{**FLAGS, **flags})
    assert [group.kind for group in engine.limits.groups] == ["full", "state"]
    assert engine.limits.pages[1] == 8, "a state for each row, and as many for prefixes"
    prompts = [draw(length, seed=length) for length in (3, 37, 1, 64, 16, 50)]
    assert [output for output, _ in engine.ask(*prompts)] == [expected(theirs, prompt) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4])
def test_prefixes_go_on_with_copies_of_states(model: tuple[Path, transformers.PreTrainedModel], page_size: int) -> None:
    """Chunks of 16 tokens: a state is kept behind each, and where a prompt branches off."""
    folder, theirs = model
    engine = LocalEngine(folder, new=NEW, max_total_tokens=2000, page_size=page_size, **FLAGS)
    base = draw(40, seed=1)
    for tail, cached in ((draw(9, seed=2), 0), (draw(9, seed=3), 32), (draw(4, seed=4), 40)):
        prompt = [*base, *tail]
        assert engine.ask(prompt)[0] == (expected(theirs, prompt), cached)
    for seed in range(5, 12):  # which evict states, but not tokens
        engine.ask(draw(33, seed=seed))
    prompt = [*base, *draw(7, seed=12)]
    assert engine.ask(prompt)[0] == (expected(theirs, prompt), 0)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_retracted_request_begins_again(model: tuple[Path, transformers.PreTrainedModel], page_size: int) -> None:
    folder, theirs = model
    tight = {"max_total_tokens": 80, "schedule_conservativeness": 0.01}  # two begin, and only one can end
    engine = LocalEngine(folder, new=NEW, page_size=page_size, **FLAGS, **tight)
    prompts = [draw(20, seed=seed) for seed in (21, 22, 23, 24)]
    assert [output for output, _ in engine.ask(*prompts)] == [expected(theirs, prompt) for prompt in prompts]
    assert engine.scheduler._planner.retraction.retracted
