"""The model of a step's cost compared with measurements on one H200 (docs/performance.md).

`bough bench costs` runs it in a checkout. Each load is divided into steps as the
scheduler does, and the modelled times of the steps are added up.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from bough.bench.offline import workload
from bough.core.model_config import ModelConfig
from bough.core.settings import ModelSettings, Settings
from bough.distributed.cost_model import GPUS, Cluster, Load, ModelShare, Split, step_cost
from bough.executor.load_model import resolve_config
from bough.executor.sizing import GPU_ROWS, default_gpu_chunk
from bough.executor.splits import outlooks, share_of
from bough.loader.locate import find_files

PREFIX = 1024  # tokens that prompts of W2 share
SHARED_READ = 0.2  # of the time that each row would take to read them: they are read together
ONE_H200 = Cluster(GPUS["H200"], 1)
# docs/performance.md, offline: output tok/s of W1, seconds of W2, ms per step of W3, prompt tok/s of W4.
MEASURED = {
    ("qwen3-0.6b", 2.0): {"W1": 26_784, "W2": 0.506, "W3": 0.653, "W4": 353_825},
    ("llama-3.1-8b", 2.0): {"W1": 10_300, "W2": 2.11, "W3": 3.850, "W4": 41_883},
    ("qwen3-30b-a3b", 2.0): {"W1": 6_520, "W2": 2.09, "W3": 2.31, "W4": 68_316},
    ("deepseek-v2-lite", 2.0): {"W1": 11_180, "W2": 1.62, "W3": 1.88, "W4": 102_660},
    ("llama-3.1-8b", 1.0): {"W1": 12_607, "W3": 2.78},
    ("llama-3.1-8b", 0.5): {"W3": 1.90},
}


@cache
def config_of(shape: str) -> ModelConfig:
    settings = Settings(model=ModelSettings(model_shape=shape))
    return resolve_config(find_files(settings.model), settings)


@cache
def loads_of(name: str, chunk: int) -> list[Load]:
    """The steps of a load, dealt as the scheduler does: a token for each row, and a chunk of the prompts that wait."""
    waiting, loads = deque(workload(name)), []
    prefixes: set[tuple[int, ...]] = set()  # of W2: each is computed once
    running: list[tuple[float, int]] = []  # tokens to be read, and those left to make
    begun: tuple[int, int, int] | None = None  # a prompt in work: tokens that are computed, all, and those to make
    while waiting or running or begun:
        held = sum(read for read, _ in running)
        decodes, room, seen = len(running), chunk, 0.0
        ready: list[tuple[float, int]] = []
        while room and (begun or (waiting and len(running) + len(ready) < GPU_ROWS)):
            if begun is None:
                job = waiting.popleft()
                start, known = tuple(job.prompt[:PREFIX]), 0
                if name == "W2":
                    known = PREFIX * (start in prefixes)
                    prefixes.add(start)
                begun = known, len(job.prompt), job.output_tokens
            done, length, left = begun
            took = min(room, length - done)
            seen, room = seen + took * (done + took / 2), room - took
            begun = (done + took, length, left) if done + took < length else None
            if begun is None:
                ready.append((length - (1.0 - SHARED_READ) * PREFIX * (name == "W2"), left))
        prompt = chunk - room
        loads.append(Load(decodes, held / max(1, decodes), prompt, seen / max(1, prompt)))
        running = [(read + 1, left - 1) for read, left in running + ready if left > 1]
    return loads


@cache
def share_for(shape: str, weight_bytes: float) -> ModelShare:
    return share_of(config_of(shape), weight_bytes, torch.bfloat16)


def modelled(shape: str, weight_bytes: float, name: str) -> float:
    """The load's figure in the unit in which it was measured."""
    config = config_of(shape)
    share = share_for(shape, weight_bytes)
    loads = loads_of(name, default_gpu_chunk(replace(config, context_length=8192)))
    seconds = sum(sum(step_cost(share, ONE_H200, Split(), load).values()) for load in loads)
    jobs = workload(name)
    if name == "W1":
        return sum(job.output_tokens for job in jobs) / seconds
    if name == "W4":
        return sum(len(job.prompt) for job in jobs) / seconds
    return 1e3 * seconds / sum(job.output_tokens for job in jobs) if name == "W3" else seconds


# Tokens that fit beside the weights, as docs/performance.md has them.
MEASURED_ROOM = {"qwen3-0.6b": 1_159_143, "llama-3.1-8b": 900_816}
UNITS = {"W1": "output tok/s", "W2": "seconds", "W3": "ms per step", "W4": "prompt tok/s"}
RANKS = (2, 8, 16, 64)
SIZES = (1 << 14, 1 << 20, 1 << 26)  # bytes


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--exchanges", action="store_true", help="print modelled times of exchanges between H200s instead"
    )


def main(args: argparse.Namespace) -> int:
    for row in exchange_rows() if args.exchanges else compared_rows():
        print(f"| {' | '.join(row)} |")
    return 0


def compared_rows() -> Iterator[list[str]]:
    yield ["model, bits of a weight", "figure", "measured", "modelled", "error"]
    yield ["---"] * 5
    errors = []
    for (shape, weight_bytes), figures in MEASURED.items():
        for name, measured in figures.items():
            found = modelled(shape, weight_bytes, name)
            if weight_bytes == 2.0:
                errors.append(abs(found / measured - 1.0))
            yield _row(f"{shape}, {8 * weight_bytes:.0f}", f"{name}, {UNITS[name]}", measured, found)
    for shape, measured in MEASURED_ROOM.items():
        settings = Settings(model=ModelSettings(model_shape=shape, context_length=8192))
        (only,) = outlooks(resolve_config(find_files(settings.model), settings), settings, ONE_H200, 2.0, 8192)
        yield _row(f"{shape}, 16", "tokens that fit", measured, only.kv_tokens)
    yield ["all of 16 bits", "W1 to W4, mean and largest error", "", "", f"{np.mean(errors):.0%}, {max(errors):.0%}"]


def _row(model: str, figure: str, measured: float, found: float) -> list[str]:
    digits = 0 if measured > 1000 else 2
    return [model, figure, f"{measured:,.{digits}f}", f"{found:,.{digits}f}", f"{found / measured - 1.0:+.0%}"]


def exchange_rows() -> Iterator[list[str]]:
    """Microseconds on hosts of eight."""
    yield ["exchange of each rank", *(f"{ranks} ranks" for ranks in RANKS)]
    yield ["---"] * (1 + len(RANKS))
    cluster = Cluster(GPUS["H200"], 8, 8)
    for name, cost in (
        ("all-reduce", lambda n, r: 2.0 * cluster.all_gather_s(n, r)),
        ("all-to-all", cluster.all_to_all_s),
    ):
        for nbytes in SIZES:
            yield [f"{name}, {nbytes / 2**10:,.0f} KiB", *(f"{1e6 * cost(nbytes, ranks):,.0f} µs" for ranks in RANKS)]
