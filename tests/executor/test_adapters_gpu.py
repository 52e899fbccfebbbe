"""Adapters on a real device: eight of them and none in one batch give the tokens of merged weights, by graphs and
without, with cached prefixes and prompts in chunks; and a step of rows without adapters is the plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bough.executor.cuda_executor import CudaExecutor
from tests.executor.test_executor_adapters_simulated import KINDS
from tests.fakes.adapters import merge, write_adapter
from tests.fakes.checkpoints import write_checkpoint
from tests.parity.engines import LocalEngine
from tests.parity.test_lora import prompts_of

pytestmark = pytest.mark.gpu

NEW = 12
FLAGS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_total_tokens": 4096, "max_running_requests": 16}
PROMPTS = prompts_of(3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("lora") / "base", 1)


@pytest.fixture(scope="module")
def adapters(base: Path) -> list[Path]:
    return [write_adapter(base.parent / f"a{n}", base, n, **kind) for n, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def expected(base: Path, adapters: list[Path]) -> list[list[list[int]]]:
    """Of the model itself, and with each adapter merged, by the same device."""
    models = [base, *(merge(base, path, base.parent / f"{path.name}-merged") for path in adapters)]
    return [[out for out, _ in LocalEngine(model, new=NEW, **FLAGS).ask(*PROMPTS)] for model in models]


def engine_for(base: Path, adapters: list[Path], **flags: Any) -> LocalEngine:
    engine = LocalEngine(base, new=NEW, **{**FLAGS, "enable_lora": True, **flags})
    assert engine.adapters is not None
    for path in adapters:
        engine.adapters.load(path.name, str(path))
    return engine


@pytest.mark.parametrize(
    "flags",
    [
        {"max_loras_per_batch": 8},
        {"max_loras_per_batch": 3},
        {"max_loras_per_batch": 8, "disable_cuda_graph": True},
        {"max_loras_per_batch": 8, "speculative_algorithm": "NGRAM"},
        {"max_loras_per_batch": 2, "max_total_tokens": 90, "schedule_conservativeness": 0.0},
    ],
    ids=str,
)
def test_eight_adapters_and_none_in_one_batch(
    base: Path, adapters: list[Path], expected: list[list[list[int]]], flags: dict[str, Any]
) -> None:
    engine = engine_for(base, adapters, **flags)
    while engine.executor.idle():
        pass
    names = ["", *(path.name for path in adapters)]
    for turn in range(2):  # the second time prefixes are cached, where there is room
        for prompt in range(len(PROMPTS)):
            got = engine.ask(*[PROMPTS[prompt]] * len(names), adapters=names)
            assert [output for output, _ in got] == [of_model[prompt] for of_model in expected]
            assert turn == 0 or "max_total_tokens" in flags or all(cached for _, cached in got)
    executor = engine.executor
    assert isinstance(executor, CudaExecutor)
    if "disable_cuda_graph" not in flags and "speculative_algorithm" not in flags:
        assert executor._adapted_graphs._uses and executor._adapted_mixed_graphs._uses
    executor.close()


def test_adapters_that_come_while_others_run(base: Path, adapters: list[Path], expected: list[list[list[int]]]) -> None:
    """The seventh has a larger rank than the slots have memory for, so graphs are captured anew."""
    engine = engine_for(base, adapters[:1], max_loras_per_batch=2)
    while engine.executor.idle():
        pass
    assert engine.adapters is not None
    for number, path in enumerate(adapters[1:], 2):
        engine.adapters.load(path.name, str(path))
        got = engine.ask(PROMPTS[0], PROMPTS[0], adapters=[path.name, ""])
        assert [output for output, _ in got] == [expected[number][0], expected[0][0]]
        while engine.executor.idle():
            pass
    engine.executor.close()


def test_bfloat16_runs_and_rows_without_adapters_are_the_plain_ones(base: Path, adapters: list[Path]) -> None:
    flags = {**FLAGS, "dtype": "bfloat16"}
    plain = LocalEngine(base, new=NEW, **flags).ask(*PROMPTS)
    engine = engine_for(base, adapters, dtype="bfloat16")
    while engine.executor.idle():
        pass
    assert engine.ask(*PROMPTS) == plain
    assert isinstance(engine.executor, CudaExecutor) and not engine.executor._adapted_graphs._uses
    assert engine.ask(PROMPTS[0], adapters=["a0"])[0][0] != plain[0][0]
    engine.executor.close()
