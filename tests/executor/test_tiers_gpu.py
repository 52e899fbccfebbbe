"""On a GPU, too, pages of every kind come back from pinned memory and from a store as they went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.executor.host_memory import host_memory
from bough.loader.locate import locate
from tests.executor.test_executor_pipelines import CONFIGS
from tests.executor.test_executor_tiers import KINDS, round_trip, through_a_store
from tests.fakes.checkpoints import write_checkpoint

pytestmark = pytest.mark.gpu

EIGHT_BITS: dict[str, dict[str, Any]] = {
    f"{model} fp8": {"kv_cache_dtype": "fp8_e4m3"} for model in ("llama", "latent", "windows")
}


@pytest.mark.parametrize("kind", [*KINDS, *EIGHT_BITS])
def test_a_round_trip_changes_no_bit(kind: str, tmp_path: Path) -> None:
    model = kind.split()[0]
    layers = {} if model == "states" else {"num_hidden_layers": 4}
    heads = {} if model in ("latent", "sparse") else {"head_dim": 32}  # Triton takes none of 8 columns
    folder = write_checkpoint(tmp_path / "model", 3, torch.bfloat16, **CONFIGS[model] | layers | heads)
    flat = {
        "device": "cuda",
        "max_total_tokens": 64,
        "max_running_requests": 2,
        "chunked_prefill_size": 8,
        "hicache_ratio": 4.0,
        **{**KINDS, **EIGHT_BITS}[kind],
    }
    settings = Settings.from_flat(flat)
    executor: Any = build_executor(locate(str(folder)), settings).executor
    while executor.idle():
        pass
    through_a_store(executor)
    executor.host = host_memory(executor.limits(), settings)
    round_trip(executor)
    executor.close()
