"""The most demanding requests together take no more device memory than was kept free for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.executor.sizing import StepShape
from bough.loader.locate import locate
from bough.messages.requests import LogprobRequest
from tests.conftest import TINY_LLAMA
from tests.fakes.scheduler_bench import Bench

pytestmark = pytest.mark.gpu

ROWS, CHUNK, VOCABULARY, HIDDEN, CONTEXT = 96, 512, 151_936, 128, 512
LIBRARIES = 64 << 20  # workspaces of matrix products, which are not the step's own


def test_penalties_biases_filters_and_logprobs_for_every_row(tmp_path: Path) -> None:
    config = {**TINY_LLAMA, "hidden_size": HIDDEN, "head_dim": 32, "vocab_size": VOCABULARY}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"load_format": "dummy", "max_running_requests": ROWS, "max_total_tokens": 16_384}
    settings |= {"chunked_prefill_size": CHUNK, "disable_cuda_graph": True}
    executor = build_executor(locate(str(tmp_path)), Settings.from_flat(settings)).executor
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bench = Bench(executor)  # type: ignore[arg-type]
    for row in range(ROWS):
        bench.ask(
            row,
            [(row + 7 * j) % 1000 for j in range(100)],
            max_new_tokens=8,
            ignore_eos=True,
            seed=row,
            top_p=0.9,
            repetition_penalty=1.2,
            frequency_penalty=0.3,
            logit_bias={5: 1.0},
            logprobs=LogprobRequest(0, 20, (1, 2)),
        )
    bench.run()
    peak = torch.cuda.max_memory_allocated() - before
    shape = StepShape(ROWS, CHUNK, VOCABULARY, HIDDEN, CONTEXT, 1, 2, 2)
    kept = shape.step_bytes(0) + shape.row_bytes()
    print(f"peak {peak / 2**20:.0f} MiB, kept {kept / 2**20:.0f} MiB")
    executor.close()
    assert peak <= kept + LIBRARIES
