"""Images on the CUDA executor, without a GPU: steps with images take the graphs of steps with prompts, except where an
image's tokens attend to each other both ways, and all give what transformers gives. Triton's interpreter computes, as
in `test_executor_cuda_simulated`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bough.core.plan import Limits
from bough.core.settings import Settings
from bough.executor.cuda_executor import CudaExecutor
from bough.executor.cuda_parts import assemble
from bough.executor.graphs import GraphSizes
from bough.executor.load_model import load_model, resolve_config
from bough.kernels.triton_ops import TRITON
from bough.loader.locate import locate
from tests.executor.test_executor_cuda_simulated import CPU, no_device  # noqa: F401  (a fixture for all tests here)
from tests.fakes.scheduler_bench import Bench
from tests.parity.test_media import INTERPRETED, Model, make, text

SAMPLED = 3
GRAPHS = GraphSizes(decode=(2,), mixed=(34,))  # no step has more tokens


class Watched:
    """Counts steps by whether they hold images and whether a graph computes them."""

    def __init__(self, executor: CudaExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executor, self.steps = executor, list[tuple[bool, bool]]()
        launch, forward = executor.launch, executor._model.forward

        def watched(plan: Any) -> Any:
            before = len(self._eager)
            running = launch(plan)
            self.steps.append((plan.media is not None, len(self._eager) == before))
            return running

        def eager(*args: Any) -> torch.Tensor:
            if not self._replaying:
                self._eager.append(1)
            return forward(*args)

        self._eager, self._replaying = list[int](), False
        monkeypatch.setattr(executor, "launch", watched)
        monkeypatch.setattr(executor._model, "forward", eager)
        for graph in (*executor._mixed_graphs._graphs.values(), *executor._decode_graphs._graphs.values()):
            graph = getattr(graph, "forward", graph)
            monkeypatch.setattr(graph, "replay", self._of(graph.replay))

    def _of(self, replay: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def replayed() -> torch.Tensor:
            self._replaying = True
            try:
                return replay()
            finally:
                self._replaying = False

        return replayed


def executor_of(model: Model, monkeypatch: pytest.MonkeyPatch, graphs: GraphSizes) -> CudaExecutor:
    monkeypatch.setattr("bough.kernels.registry.ops_for", lambda device, deterministic: TRITON)
    settings = Settings.from_flat({"dtype": "float32"})
    files = locate(str(model.folder))
    loaded = load_model(files, settings, resolve_config(files, settings), CPU)
    groups = loaded.config.kv_groups
    limits = Limits(2, 1, (200,) * len(groups), 128, 97, 32, "", groups=groups, media=loaded.media_limits)
    executor = assemble(loaded, settings, limits, graphs)
    with torch.inference_mode():
        while any(kind.capture_next() for kind in executor._graphs):
            pass
    return executor


@pytest.mark.slow
@pytest.mark.parametrize("name", [INTERPRETED[0], *(pytest.param(n, marks=pytest.mark.long) for n in INTERPRETED[1:])])
def test_images_give_the_tokens_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = make(name, tmp_path)
    executor = executor_of(model, monkeypatch, GRAPHS)
    watched = Watched(executor, monkeypatch)
    bench = Bench(cast(Any, executor), enable_mixed_chunk=True)
    images = model.case.images
    prompts = [model.prompt(text(9, 1), images), (text(6, 2), [])]
    asked = [model.media(tmp_path, *prompts[0], images), (prompts[1][0], None)]
    for handle, (ids, media) in enumerate(asked):
        bench.ask(handle, ids, max_new_tokens=SAMPLED, temperature=0.0, ignore_eos=True, media=media)
    bench.run()
    assert bench.out.outputs[0] == model.continued(prompts[0][0], images)[0][:SAMPLED]
    assert bench.out.outputs[1] == model.continued(prompts[1][0], [])[0][:SAMPLED]
    captured = [graph for shown, graph in watched.steps if shown]
    assert captured and all(graph for shown, graph in watched.steps if not shown)
    assert not any(captured) if name == "gemma3" else all(captured), "gemma3's images are seen both ways"
    executor.close()
