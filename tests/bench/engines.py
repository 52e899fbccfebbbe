"""What benchmarks that start engines have in common: engines that are warm, and how fast a GPU copies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import bough

COPY_BYTES, COPIES = 1 << 30, 5


def state_of(engine: bough.Engine) -> dict[str, Any]:
    state: dict[str, Any] = engine.get_server_info()["internal_states"][0]
    return state


def warm(engine: bough.Engine) -> None:
    """Answers once, and captures its CUDA graphs, which an engine does while it rests."""
    engine.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 2})
    while state_of(engine)["warming_up"]:
        time.sleep(0.05)


def on_gpu(flat: Mapping[str, Any]) -> bool:
    """Whether an engine with these settings has one."""
    import torch

    return flat.get("device") != "cpu" and torch.cuda.is_available()


def gpu_copy_gb_s(origin: str) -> float:
    """How fast a GPU copies to its memory from `cpu`, pinned memory of the host, or from `cuda`, its own."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=origin, pin_memory=origin == "cpu")
    target, seconds = torch.empty_like(source, device="cuda"), []
    for _ in range(COPIES):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return COPY_BYTES / min(seconds) / 1e9
