"""A decode that verifies drafts gives the tokens, and their logprobs, that decodes without drafts would have given."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bough.core.plan import BatchPlan, LogprobSpec, RowSetup, StepResult, TokenMasks, mask_words
from bough.core.sampling_params import SamplingParams
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.loader.locate import locate
from bough.native.library import load_library
from tests.conftest import TINY_LLAMA

VOCABULARY, PAGES, TOKENS = 128, 64, 40
PROMPTS = {0: [5, 9, 17, 33], 1: [8, 8, 8], 2: [1, 44, 50, 2, 7]}
SAMPLING: dict[int, dict[str, Any]] = {
    0: {"temperature": 0.0},
    1: {"temperature": 1.5, "top_k": 40},
    2: {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
}
NONE = np.zeros(0, dtype=np.int32)


def ints(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(list(values), dtype=np.int32)


@pytest.fixture(params=["native", "torch", pytest.param("triton", marks=pytest.mark.gpu)])
def make_executor(request: pytest.FixtureRequest, tiny_model: Path, tmp_path: Path) -> Callable[[], Any]:
    if request.param == "native" and load_library() is None:
        pytest.skip("the CPU kernels are not compiled")
    folder, device = tiny_model, {"device": "cpu", "cpu_threads": 1}
    if request.param == "triton":
        folder, device = tmp_path, {"device": "cuda"}
        shape = {"hidden_size": 128, "head_dim": 32, "vocab_size": VOCABULARY}  # products have 16 columns or more
        (folder / "config.json").write_text(json.dumps(TINY_LLAMA | shape))
    flat = {"load_format": "dummy", "dtype": "float32", "max_total_tokens": 256, **device}

    def make() -> Any:
        settings = Settings.from_flat({**flat, "attention_backend": request.param, "random_seed": 3})
        return build_executor(locate(str(folder)), settings).executor

    return make


class Rows:
    """Three requests on an executor, each on pages of its own."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._step = 0
        self.outputs: dict[int, list[int]] = {row: [] for row in PROMPTS}
        self.scores: dict[int, list[float]] = {row: [] for row in PROMPTS}
        setups = tuple(
            RowSetup(
                row=row,
                sampling=SamplingParams(**SAMPLING[row]),
                seed=11 + row,
                pages=(NONE,),
                length=0,
                generated=0,
                history=ints(prompt),
                prompt_len=len(prompt),
                logprobs=LogprobSpec(),
                stop_ids=(),
            )
            for row, prompt in PROMPTS.items()
        )
        lens = ints(map(len, PROMPTS.values()))
        pages = ints(1 + PAGES * row + i for row in PROMPTS for i in range(PAGES))
        self._run({row: len(prompt) for row, prompt in PROMPTS.items()}, PROMPTS, lens, setups, pages)

    def decode(self, drafts: dict[int, list[int]], masks: dict[int, list[Any]] | None = None) -> list[int]:
        """One step of all rows; how many tokens each got."""
        lens = {row: 1 + len(drafts[row]) for row in PROMPTS}
        return self._run(lens, drafts, ints(len(drafts[row]) for row in PROMPTS), (), NONE, masks)

    def _run(
        self, lens: Any, tokens: Any, given: Any, setups: Any, pages: Any, masks: dict[int, list[Any]] | None = None
    ) -> list[int]:
        plan = BatchPlan(
            step=self._step,
            setups=setups,
            edits=(),
            rows=ints(PROMPTS),
            query_lens=ints(lens.values()),
            given=given,
            tokens=ints(token for row in PROMPTS for token in tokens[row]),
            new_pages=(pages,),
            new_page_counts=(ints((PAGES if setups else 0) for _ in PROMPTS),),
            sample=np.ones(len(PROMPTS), dtype=np.bool_),
            masked=None if masks is None else np.array([row in masks for row in PROMPTS]),
        )
        running = self._executor.launch(plan)
        if masks is not None:
            words = np.concatenate([np.stack(masks[row]) for row in PROMPTS if row in masks])
            self._executor.supply_masks(self._step, TokenMasks(words))
        result: StepResult = running.wait()
        self._step += 1
        assert not result.bad.any()
        for row in PROMPTS:
            count = int(result.counts[row])
            self.outputs[row] += result.tokens[row, :count].tolist()
            run = result.output_logprobs[row]
            assert run.tokens.tolist() == result.tokens[row, :count].tolist()
            self.scores[row] += run.logprobs.tolist()
        counts: list[int] = result.counts.tolist()
        return counts


def test_outputs_are_those_without_drafts(make_executor: Callable[[], Any]) -> None:
    check_outputs(make_executor, TOKENS, {1, 2, 3, 4})


def check_outputs(make_executor: Callable[[], Any], tokens: int, counts: set[int], near: float = 1e-4) -> None:
    """Decodes with drafts of which some hold; so many tokens came of a step."""
    alone = Rows(make_executor())
    for _ in range(tokens):
        assert alone.decode({row: [] for row in PROMPTS}) == [1, 1, 1]
    rows, draw, seen = Rows(make_executor()), random.Random(1), set()
    while max(map(len, rows.outputs.values())) < tokens - 4:
        drafts, expected = {}, []
        for row, output in rows.outputs.items():
            right = alone.outputs[row][len(output) : len(output) + draw.randint(0, 3)]
            wrong = draw.randint(0, len(right))  # the first that does not hold, or none
            drafts[row] = [*right[:wrong], *((token + 1) % VOCABULARY for token in right[wrong:])]
            expected.append(min(wrong, len(right)) + 1)
        assert rows.decode(drafts) == expected
        seen.update(expected)
    assert seen == counts
    for row, output in rows.outputs.items():
        assert output == alone.outputs[row][: len(output)]
        assert rows.scores[row] == pytest.approx(alone.scores[row][: len(output)], abs=near)


def only(*tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    words = np.zeros(mask_words(VOCABULARY), dtype=np.int32).view(np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def test_each_position_has_its_own_mask(make_executor: Callable[[], Any]) -> None:
    rows = Rows(make_executor())
    masks = {1: [only(20), only(30), only(40)], 2: [only(50)]}
    assert rows.decode({0: [], 1: [20, 31], 2: []}, masks) == [1, 2, 1]
    assert rows.outputs[1][-2:] == [20, 30] and rows.outputs[2][-1] == 50
