"""What the tier below the device costs the host: W6 on engines whose devices are clocks, with the tier and without.

128 chats of five turns over one system prompt, all at once; each round has other ones, so that both tiers are full
after some rounds. A step takes a time for each of its tokens, but no less than that of reading the weights; a copy
takes the host a time, too, and then the bus its own. Printed are the seconds of each round, and the ratio:

    PYTHONPATH=. python -m tests.bench.tier_host
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bough import Engine
from bough.core.control import Command, CommandResult, CopyPagesIn, CopyPagesOut
from bough.core.settings import Settings
from bough.launch import engine
from bough.loader.config import read_config
from bough.loader.locate import ModelFiles
from tests.bench.null_executor import NullModel
from tests.bench.offline_host import CLOCK_VARIABLE, Clock

BUILDER = "tests.bench.tier_host:build"
CHATS, TURNS, SYSTEM, ASKED, SAID = 128, 5, 512, 64, 128
TOKENS, TOKEN_BYTES, BYTES_PER_S, HELD_BYTES = 300_000, 114_688, 50e9, 64  # of Qwen3-0.6B, on a bus of 16 lanes
START_S = 200e-6  # that starting a copy takes the host


@dataclass(frozen=True, slots=True)
class Copy:
    done_at: float

    def ready(self) -> bool:
        return time.monotonic() >= self.done_at

    def wait(self) -> CommandResult:
        time.sleep(max(0.0, self.done_at - time.monotonic()))
        return CommandResult()


class CopyingClock(Clock):
    def __init__(self, vocab_size: int, token_us: float, least_ms: float) -> None:
        super().__init__(8192, vocab_size, os.devnull, token_us, least_ms)
        self._limits = replace(self._limits, pages=(TOKENS,), page_bytes=(HELD_BYTES,))
        self._bus_free_at = 0.0

    def control(self, command: Command) -> Copy:
        assert isinstance(command, CopyPagesIn | CopyPagesOut)
        began = time.perf_counter()
        while time.perf_counter() < began + START_S:
            pass
        seconds = len(command.pages) * TOKEN_BYTES / BYTES_PER_S
        self._bus_free_at = max(self._bus_free_at, time.monotonic()) + seconds
        return Copy(self._bus_free_at)


class Built(NullModel):
    host = None


def build(files: ModelFiles, settings: Settings) -> NullModel:
    config = read_config(files, {})
    return Built(CopyingClock(config.vocab_size, *json.loads(os.environ[CLOCK_VARIABLE])), config)


async def chats(asked: Engine, seed: int) -> float:
    draw = np.random.default_rng(seed)
    system = draw.integers(10, 150_000, SYSTEM).tolist()

    async def chat() -> None:
        text = list(system)
        for _ in range(TURNS):
            text += draw.integers(10, 150_000, ASKED).tolist()
            sampling = {"max_new_tokens": SAID, "ignore_eos": True}
            async for output in await asked.async_generate(input_ids=text, sampling_params=sampling, stream=True):
                said = output["output_ids"]
            text += said

    began = time.perf_counter()
    await asyncio.gather(*(chat() for _ in range(CHATS)))
    return time.perf_counter() - began


async def compare(without: Engine, tiered: Engine, rounds: int) -> None:
    seconds: tuple[list[float], list[float]] = [], []
    for number in range(rounds):
        for kind in (0, 1) if number % 2 else (1, 0):
            seconds[kind].append(await chats((without, tiered)[kind], number))
        print(json.dumps({"without_s": round(seconds[0][-1], 3), "with_s": round(seconds[1][-1], 3)}), flush=True)
    medians = [statistics.median(each[1:]) for each in seconds]
    print(json.dumps({"ratio": round(medians[1] / medians[0], 4)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--token-us", type=float, default=2.9, help="that a token takes (Qwen3-0.6B on an H200)")
    parser.add_argument("--least-ms", type=float, default=3.0, help="that a step takes")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    os.environ[CLOCK_VARIABLE] = json.dumps([args.token_us, args.least_ms])
    engine.EngineProcesses = functools.partial(engine.EngineProcesses, executor=BUILDER)  # type: ignore
    flags: dict[str, Any] = {
        "model_shape": "qwen3-0.6b",
        "context_length": 8192,
        "skip_tokenizer_init": True,
        "stream_interval": 8,
    }
    with (
        engine.Engine(**flags) as without,
        engine.Engine(**flags, enable_hierarchical_cache=True, hicache_ratio=1.0) as tiered,
    ):
        asyncio.run(compare(without, tiered, args.rounds))


if __name__ == "__main__":
    main()
