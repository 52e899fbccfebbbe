"""Images on the CUDA executor, without a GPU: steps with images run kernel by kernel, decodes by graphs, and all give
what transformers gives. Triton's interpreter computes, as in `test_executor_cuda_simulated`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bough.core.plan import Limits
from bough.core.settings import Settings
from bough.executor.cuda_parts import assemble
from bough.executor.graphs import GraphSizes
from bough.executor.load_model import load_model, resolve_config
from bough.kernels.triton_ops import TRITON
from bough.loader.locate import locate
from tests.executor.test_executor_cuda_simulated import CPU, no_device  # noqa: F401  (a fixture for all tests here)
from tests.fakes.scheduler_bench import Bench
from tests.parity.test_media import INTERPRETED, make, text

SAMPLED = 3


@pytest.mark.slow
@pytest.mark.parametrize("name", [INTERPRETED[0], pytest.param(INTERPRETED[1], marks=pytest.mark.long)])
def test_images_give_the_tokens_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("bough.kernels.registry.ops_for", lambda device, deterministic: TRITON)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    model = make(name, tmp_path)
    settings = Settings.from_flat({"dtype": "float32"})
    files = locate(str(tmp_path))
    loaded = load_model(files, settings, resolve_config(files, settings), CPU)
    groups = loaded.config.kv_groups
    limits = Limits(2, 1, (200,) * len(groups), 128, 97, 32, "", groups=groups, media=loaded.media_limits)
    executor = assemble(loaded, settings, limits, GraphSizes(decode=(2,)))
    assert executor.capture_next()
    bench = Bench(cast(Any, executor), enable_mixed_chunk=True)
    images = model.case.images
    prompts = [model.prompt(text(9, 1), images), (text(6, 2), [])]
    asked = [model.media(tmp_path, *prompts[0], images), (prompts[1][0], None)]
    for handle, (ids, media) in enumerate(asked):
        bench.ask(handle, ids, max_new_tokens=SAMPLED, temperature=0.0, ignore_eos=True, media=media)
    bench.run()
    assert bench.out.outputs[0] == model.continued(prompts[0][0], images)[0][:SAMPLED]
    assert bench.out.outputs[1] == model.continued(prompts[1][0], [])[0][:SAMPLED]
    executor.close()
