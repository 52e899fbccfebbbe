"""Constrained requests on a real executor, with a tiny model: jumps and overlap change only the number of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bough.core.finish import FinishStop
from bough.core.plan import BatchPlan, Executor, InFlight
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.loader.locate import locate
from bough.messages.requests import LogprobRequest
from tests.conftest import TINY_LLAMA
from tests.fakes.grammars import EOS, PIECES, FakeGrammars, Places, grammar
from tests.fakes.scheduler_bench import Bench

CHOICE = [11, 22, 33, 44]  # no bytes that merge: a text has one spelling
PLACES: Places = [CHOICE, [9], [8], [7], [6], [9], CHOICE, [8], [7], [6], [5], CHOICE]
FREE = {"temperature": 0.0, "max_new_tokens": 10, "ignore_eos": True}
SETTINGS = {"device": "cpu", "load_format": "dummy", "max_running_requests": 8, "max_total_tokens": 1024}


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, "vocab_size": 200}))
    settings = Settings.from_flat({**SETTINGS, "dtype": "float32", "cpu_threads": 1, "chunked_prefill_size": 16})
    made = build_executor(locate(str(folder)), settings).executor
    yield made
    made.close()


class Counted:
    """Counts the steps of an executor that is used again."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, plan: BatchPlan) -> InFlight:
        self.steps += 1
        return self._inner.launch(plan)


def serve(executor: Executor, **settings: Any) -> tuple[Bench, int]:
    """Free and constrained requests side by side, with logprobs, penalties and samples at random among them."""
    counted = Counted(executor)
    bench = Bench(counted, eos_ids=(EOS,), grammars=FakeGrammars(), **settings)  # type: ignore[arg-type]
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 5},
        {"temperature": 0.0, "logprobs": LogprobRequest()},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "seed": 6},
    ]
    for handle, option in enumerate(options):
        bench.ask(handle, [3 + handle, 4, 5], max_new_tokens=40, regex=grammar(PLACES), **option)
    bench.ask(9, [1, 2, 3], **FREE)
    bench.run()
    return bench, counted.steps


def test_jumps_and_overlap_change_only_the_number_of_steps(executor: Executor) -> None:
    results = {
        (jumps, overlap): serve(executor, disable_jump_forward=not jumps, disable_overlap_schedule=not overlap)
        for jumps in (True, False)
        for overlap in (True, False)
    }
    plain, steps = results[False, False]
    assert results[True, True][1] < steps and results[True, False][1] < steps
    for bench, _ in results.values():
        assert bench.out.outputs == plain.out.outputs
        for handle in range(4):
            text = b"".join(PIECES[token] for token in bench.out.outputs[handle])
            assert len(text) == len(PLACES) and all(byte in place for byte, place in zip(text, PLACES, strict=True))
            assert bench.out.ended[handle] == FinishStop(EOS)
        assert bench.out.scored[2] == bench.out.outputs[2]
        np.testing.assert_allclose(bench.out.scores[2], plain.out.scores[2], atol=1e-4)
