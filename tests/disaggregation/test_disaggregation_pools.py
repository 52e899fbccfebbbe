"""Pages of every kind arrive as they were: with real models, a pair of engines gives one engine's logprobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from bough.core.plan import Executor
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.loader.locate import locate
from bough.messages.requests import FlushCache, LogprobRequest
from tests.executor.test_executor_pipelines import CONFIGS
from tests.executor.test_executor_ranks import with_ranks
from tests.executor.test_executor_tiers import KINDS, PROMPT
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.engine_pair import EnginePair

FLAGS = {"max_total_tokens": 64, "max_running_requests": 2, "chunked_prefill_size": 8}


def hand_over(prefill: Executor, decode: Executor, close: float = 1e-5) -> None:
    """The prefill engine is asked by itself first."""
    pair = EnginePair(lambda: cast(Any, prefill), decode_executor=cast(Any, decode))
    wants = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True, "logprobs": LogprobRequest(start=0)}
    pair.prefill.ask(1, PROMPT, **wants)
    pair.run()
    pair.prefill.submit(FlushCache(0))
    pair.ask(1, PROMPT, **wants)
    pair.run()
    alone, paired = pair.prefill.out, pair.decode.out
    assert paired.outputs[1] == alone.outputs[1] and len(paired.outputs[1]) == 6
    assert paired.scores[1] == pytest.approx(alone.scores[1], abs=close)
    assert paired.started[1].input_logprobs == alone.started[1].input_logprobs
    left = len(PROMPT) % decode.limits().page_size
    assert pair.decode.scheduler._committer.prefilled_tokens == left + 1, "the rest of the prompt was handed over"


@pytest.mark.parametrize("kind", KINDS)
def test_answers_behind_pages_that_were_handed_over(kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", 3, **CONFIGS[kind.split()[0]])
    settings = Settings.from_flat({"device": "cpu", "cpu_threads": 1, **FLAGS, **KINDS[kind]})
    engines = [build_executor(locate(str(folder)), settings).executor for _ in range(2)]
    hand_over(*engines)
    for engine in engines:
        engine.close()


def test_the_parts_of_all_ranks_arrive(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", 3, **CONFIGS["llama"])
    with_ranks(folder, 2, lambda one: with_ranks(folder, 2, lambda two: hand_over(one, two), **FLAGS), **FLAGS)
