"""Stages in threads of one process: the tokens are those of one rank, and each stage holds and loads its part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bough.core.control import CopyPagesOut, SwapWeights
from bough.core.errors import RankLostError, RequestError, SettingsError
from bough.core.plan import Executor, StepResult
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.executor.ranks import PipelinedStep, Results
from bough.loader.locate import locate
from bough.messages.requests import LogprobRequest
from tests.executor.test_executor_ranks import FLAGS, PAGES, alone, build, mixed_load, with_ranks
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.executor import Done
from tests.fakes.ranks import LLAMA, MODELS, ThreadGroup, on_ranks
from tests.fakes.scheduler_bench import Bench

LAYERS = 4
WINDOWS = {
    **LLAMA,
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "sliding_window": 8,
    "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
    "query_pre_attn_scalar": 8,
    "hidden_activation": "gelu_pytorch_tanh",
}
CONVOLUTIONS = {
    **LLAMA,
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "block_multiple_of": 16,
    "layer_types": ["conv", "conv", "full_attention", "full_attention"],
}
SPARSE = {
    **MODELS["latent"],
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 6,
}
CONFIGS: dict[str, dict[str, Any]] = {
    **MODELS,
    "windows": WINDOWS,
    "convolutions": CONVOLUTIONS,
    "sparse": SPARSE,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("stages")

    def folder(name: str) -> Path:
        path = base / name
        layers = {} if name == "states" else {"num_hidden_layers": LAYERS}
        return path if path.exists() else write_checkpoint(path, 3, **CONFIGS[name], **layers)

    return folder


@pytest.mark.parametrize(
    ("model", "size", "stages"),
    [("llama", 1, 2), ("llama", 1, 4), ("untied", 1, 3), ("llama", 2, 2), ("moe", 2, 2), ("latent", 2, 2)],
)
def test_stages_give_the_tokens_of_one_under_a_mixed_load(
    folders: Callable[[str], Path], model: str, size: int, stages: int
) -> None:
    found = with_ranks(folders(model), size, mixed_load, stages, check_ranks=True)
    assert found == alone(folders(model), mixed_load)


@pytest.mark.parametrize(("model", "size"), [("windows", 1), ("convolutions", 1), ("states", 2)])
def test_a_stage_may_have_no_layer_of_a_kind(folders: Callable[[str], Path], model: str, size: int) -> None:
    flags = {"max_total_tokens": 400, "max_running_requests": 4, "load_format": "dummy", "check_ranks": True}

    def use(executor: Executor) -> dict[int, list[int]]:
        bench = Bench(executor)  # type: ignore[arg-type]
        for handle in range(6):
            bench.ask(handle, [100 + handle] * (5 + 7 * handle), max_new_tokens=20, temperature=0.0)
        bench.run()
        return dict(bench.out.outputs)

    assert with_ranks(folders(model), size, use, 2, **flags) == alone(folders(model), use, **flags)


def test_logprobs_come_from_the_last_stage(folders: Callable[[str], Path]) -> None:
    def use(executor: Executor) -> tuple[Any, ...]:
        bench = Bench(executor)  # type: ignore[arg-type]
        asked = LogprobRequest(start=0, top=2)
        for handle in range(3):
            bench.ask(handle, [100 + handle] * 40, max_new_tokens=6, temperature=0.0, logprobs=asked)
        bench.run()
        out = bench.out
        inputs = [start.input_logprobs for _, start in sorted(out.started.items())]
        runs = [np.frombuffer(run.logprobs, np.float32) for run in inputs if run is not None]
        return dict(out.outputs), np.concatenate([*runs, *(out.scores[handle] for handle in range(3))])

    tokens, scores = with_ranks(folders("llama"), 1, use, 2)
    expected = alone(folders("llama"), use)
    assert tokens == expected[0] and len(scores) == 3 * (39 + 6)
    np.testing.assert_allclose(scores, expected[1], atol=1e-5)


def test_a_stage_holds_its_layers_and_their_part_of_the_cache(folders: Callable[[str], Path]) -> None:
    """A tied table is on the first stage and the last, the final norm on the last, and pages are those of all."""
    folder = folders("llama")

    def held(group: ThreadGroup) -> tuple[set[str], list[int], tuple[int, ...]]:
        tokens = PAGES - group.topology.rank  # the last stage has the fewest
        executor = build(folder, group, max_total_tokens=tokens)
        inner = executor._inner  # type: ignore[attr-defined]
        names = {slot.name for slot in inner._model.slots()}
        layers = [layer for layer, keys in enumerate(inner._pool.keys) if len(keys)]
        executor.close()
        limits = executor.limits()
        assert limits.note.endswith("all ranks have room for 94 pages") == (not group.topology.is_last)
        return {name.removeprefix("model.") for name in names}, layers, limits.pages

    first, middle, last = on_ranks(1, held, stages=3)
    assert [one[1] for one in (first, middle, last)] == [[0], [1, 2], [3]]
    assert [one[2] for one in (first, middle, last)] == [(PAGES - 2,)] * 3
    for names, layers, _ in (first, middle, last):
        assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {*map(str, layers)}
    others = [{name for name in one[0] if not name.startswith("layers.")} for one in (first, middle, last)]
    assert others == [{"embed_tokens.weight"}, set(), {"embed_tokens.weight", "norm.weight"}]


def test_weights_are_swapped_on_all_stages(folders: Callable[[str], Path], tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", 4, **LLAMA, num_hidden_layers=LAYERS)

    def ask(executor: Executor) -> list[int]:
        bench = Bench(executor)  # type: ignore[arg-type]
        bench.ask(1, [5, 9, 17], max_new_tokens=6, temperature=0.0)
        bench.run()
        return list(bench.out.outputs[1])

    def use(executor: Executor) -> list[list[int]]:
        before = ask(executor)
        executor.control(SwapWeights(str(other))).wait()
        return [before, ask(executor)]

    expected = [alone(folders("llama"), ask), alone(other, ask)]
    assert expected[0] != expected[1] and with_ranks(folders("llama"), 1, use, 2) == expected


def test_pages_of_a_pipeline_are_not_copied(folders: Callable[[str], Path]) -> None:
    def use(executor: Executor) -> None:
        with pytest.raises(RequestError, match="each stage has a part"):
            executor.control(CopyPagesOut(np.ones(1, dtype=np.int32), np.zeros((1, 4), dtype=np.uint8)))

    with_ranks(folders("llama"), 1, use, 2)


def test_more_stages_than_layers_are_refused(folders: Callable[[str], Path]) -> None:
    folder = folders("llama")

    def work(group: ThreadGroup) -> None:
        with pytest.raises(SettingsError, match="--pp-size 5: the 4 layers of this model make 4 stages at most"):
            build(folder, group)

    on_ranks(1, work, stages=5)


def test_one_process_cannot_be_several_stages(folders: Callable[[str], Path]) -> None:
    with pytest.raises(SettingsError, match="--pp-size 2: this command runs the model in one process"):
        build_executor(locate(str(folders("llama"))), Settings.from_flat({**FLAGS, "pp_size": 2}))


def result(step: int) -> StepResult:
    return StepResult.without_tokens(step, {}, (1.0, 2.0))


def test_results_wait_for_their_step_and_have_the_span_of_the_first_stage() -> None:
    arriving = [[result(3)], [result(4), result(5)], []]
    results = Results(lambda timeout_s: arriving.pop(0), 7.0)
    steps = [PipelinedStep(Done(StepResult.without_tokens(step, {}, (8.0, 9.0))), step, results) for step in (3, 4, 5)]
    assert [steps[0].ready(), steps[0].ready(), steps[1].ready(), steps[2].ready()] == [True] * 4
    assert [step.wait().step for step in steps] == [3, 4, 5]
    assert not PipelinedStep(Done(None), 6, results).ready()
    assert PipelinedStep(Done(result(3)), 3, Results(lambda timeout_s: [result(3)], 1.0)).wait().device_span == (
        1.0,
        2.0,
    )


def test_a_last_stage_that_sends_nothing_is_named() -> None:
    waited: list[float] = []
    results = Results(lambda timeout_s: waited.append(timeout_s) or [], 7.0)  # type: ignore[func-returns-value]
    with pytest.raises(
        RankLostError, match=r"last stage has not sent the result of step 3 within 7 s \(--dist-timeout"
    ):
        PipelinedStep(Done(result(3)), 3, results).wait()
    assert waited == [0.0, 7.0]


def test_hidden_states_go_on_as_one_tensor(folders: Callable[[str], Path]) -> None:
    sent: list[torch.Size] = []

    def use(executor: Executor) -> int:
        bench = Bench(executor)  # type: ignore[arg-type]
        bench.ask(1, [5] * 20, max_new_tokens=3, temperature=0.0)
        bench.run()
        return len(bench.out.outputs[1])

    original = ThreadGroup.pass_on
    try:
        ThreadGroup.pass_on = lambda self, x: (sent.append(x.shape), original(self, x))[1]  # type: ignore[method-assign,assignment,func-returns-value]
        assert with_ranks(folders("llama"), 1, use, 2) == 3
    finally:
        ThreadGroup.pass_on = original  # type: ignore[method-assign]
    assert sent == [(16, 64), (4, 64), (1, 64), (1, 64)]  # of chunks and decodes
