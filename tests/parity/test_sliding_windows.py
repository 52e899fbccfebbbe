"""Models with sliding windows through scheduler and executor: layers keep their window alone. What comes out is what
transformers generate, whether a prefix was cached, a window was evicted or a request was retracted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.fakes.native import NATIVE
from tests.parity.engines import LocalEngine
from tests.parity.test_tiny_checkpoints import FAMILIES

NEW = 40


@pytest.fixture(scope="module", params=["gemma3", "mistral-window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, object]:
    torch.manual_seed(3)
    theirs, _ = FAMILIES[request.param]()
    folder = tmp_path_factory.mktemp(request.param)
    theirs.eval().save_pretrained(folder)
    return folder, theirs


def expected(theirs: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    made = theirs.generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return made[0, len(prompt) :].tolist()


@pytest.mark.parametrize("backend", [NATIVE, "torch"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_windows_hold_a_fraction_and_give_what_transformers_give(
    model: tuple[Path, transformers.PreTrainedModel], backend: str, page_size: int
) -> None:
    folder, theirs = model
    engine = LocalEngine(
        folder,
        new=NEW,
        attention_backend=backend,
        page_size=page_size,
        max_running_requests=3,
        max_total_tokens=600,
        swa_full_tokens_ratio=0.01,  # as few as a row needs
    )
    assert [group.kind for group in engine.limits.groups] == ["full", "window"]
    assert engine.limits.pages[1] * page_size < 60 < engine.limits.pages[0] * page_size
    generator = torch.Generator().manual_seed(5)
    base = torch.randint(0, 90, (50,), generator=generator).tolist()
    prompts = [base, [*base[:30], 5, 6, 7], [9, 8, 7]]
    truth = [expected(theirs, prompt) for prompt in prompts]
    assert [output for output, _ in engine.ask(*prompts)] == truth  # together: rows wait for each other's windows
    assert engine.ask(prompts[0])[0][0] == truth[0]
    followed, cached = engine.ask([*base, *truth[0][:20]])[0]
    assert followed[: NEW - 20] == truth[0][20:]
    assert cached > 0


def test_a_prefix_is_reused_to_the_token(model: tuple[Path, transformers.PreTrainedModel]) -> None:
    folder, theirs = model
    engine = LocalEngine(folder, new=NEW, max_running_requests=4, max_total_tokens=2000)
    prompt = list(range(1, 60))
    truth = expected(theirs, prompt)
    assert engine.ask(prompt)[0] == (truth, 0)
    assert engine.ask(prompt)[0] == (truth, len(prompt) - 1)
    follow = [*prompt, *truth]
    assert engine.ask(follow)[0] == (expected(theirs, follow), len(follow) - 1)
