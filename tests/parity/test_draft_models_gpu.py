"""Draft models on a GPU: answers are those without, by every algorithm and attention back end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.test_draft_models import GREEDY, KINDS, flags_of, folders, prompts, serving

__all__ = ["folders"]  # the fixture
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without(kind: str, backend: str, folders: dict[str, Path]) -> None:
    folder, flags = flags_of(kind, folders)
    if kind == "smaller" and backend == "triton":
        pytest.skip("its heads are too narrow")
    on_gpu: dict[str, Any] = {"device": "cuda", "attention_backend": backend, "cpu_threads": None}
    found = []
    for more in ({}, flags):
        with serving(folder, **{**on_gpu, **more}) as bench:
            for handle, prompt in enumerate(prompts(8)):
                bench.ask(handle, prompt, max_new_tokens=24, **GREEDY)
            bench.run()
            found.append(dict(bench.out.outputs))
            drafting = bench.scheduler._planner.drafting
    assert found[0] == found[1]
    assert drafting.held == drafting.proposed if kind == "itself" else drafting.proposed > 0
