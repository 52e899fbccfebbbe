"""No launch ever waits for the device: whatever a step holds, and however far behind the device is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bough.core.control import Command, Ticket
from bough.core.plan import BatchPlan, Executor, InFlight, Limits, TokenMasks
from bough.core.settings import Settings
from bough.executor.build import build_executor
from bough.loader.locate import locate
from bough.messages.requests import LogprobRequest
from tests.conftest import TINY_LLAMA
from tests.fakes.grammars import EOS, FakeGrammars, grammar
from tests.fakes.scheduler_bench import Bench
from tests.parity.test_media import make, patches
from tests.parity.test_media import text as words

pytestmark = pytest.mark.gpu

SHAPE = {**TINY_LLAMA, "hidden_size": 128, "head_dim": 32, "vocab_size": 1000}
ROWS = 8
SETTINGS = {"load_format": "dummy", "max_running_requests": ROWS, "max_total_tokens": 4096, "chunked_prefill_size": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"disable_cuda_graph": True},
    "pages of 16": {"page_size": 16},
    "torch attention": {"attention_backend": "torch"},
    "torch for prompts": {"prefill_attention_backend": "torch"},
}
GRAMMAR = grammar([[1, 2, 3, 40], [9], [8], [7], [6], [1, 2, 3, 40]] * 3)
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 11},
    {"top_p": 0.9, "seed": 12},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "seed": 13},
    {"frequency_penalty": 0.5, "presence_penalty": 0.2, "temperature": 0.0},
    {"repetition_penalty": 1.3, "seed": 14},
    {"logit_bias": {7: 5.0}, "temperature": 0.0},
    {"min_new_tokens": 5, "stop_token_ids": (4, 5, 6), "temperature": 0.0},
    {"logprobs": LogprobRequest(-1, 3, (1, 2)), "temperature": 0.0},
    {"logprobs": LogprobRequest(0, 2, (3,)), "repetition_penalty": 1.1, "seed": 15},
    {"regex": GRAMMAR, "seed": 16},
    {"regex": GRAMMAR, "logprobs": LogprobRequest(-1, 2), "temperature": 0.0, "frequency_penalty": 0.5},
]
SLEEP_CYCLES = 2_000_000_000  # about a second: far longer than two launches take on any host


class Watched:
    """An executor whose launches fail if they wait for the device."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.armed = False
        self.launches = 0

    def limits(self) -> Limits:
        return self._inner.limits()

    def launch(self, plan: BatchPlan) -> InFlight:
        if not self.armed:
            return self._inner.launch(plan)
        self.launches += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self._inner.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def supply_masks(self, step: int, masks: TokenMasks) -> None:
        torch.cuda.set_sync_debug_mode("error" if self.armed else "default")
        try:
            self._inner.supply_masks(step, masks)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def control(self, command: Command) -> Ticket:
        return self._inner.control(command)

    def idle(self, busy: bool = False) -> bool:
        return self._inner.idle(busy)

    def close(self) -> None:
        self._inner.close()


@pytest.fixture(scope="module", params=VARIANTS)
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder: Path = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    settings = Settings.from_flat({**SETTINGS, **VARIANTS[request.param]})
    executor = Watched(build_executor(locate(str(folder)), settings).executor)
    yield executor
    executor.close()


def serve(executor: Watched, new: int) -> None:
    """Requests of every kind, twice with the same beginning: chunks, mixed steps, decodes, cached prefixes, endings."""
    bench = Bench(executor, eos_ids=(EOS,), grammars=FakeGrammars())  # type: ignore[arg-type]
    for turn in range(2):
        for i, kind in enumerate(SAMPLING):
            prompt = [(3 * i + j * j) % 900 for j in range(40 + i)] + [turn]
            bench.ask(len(SAMPLING) * turn + i, prompt, max_new_tokens=new + i, ignore_eos=True, **kind)
        bench.turn(4)
    bench.run()


def test_the_watch_notices_a_wait() -> None:
    number = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            number.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_launch_synchronises(watched: Watched) -> None:
    serve(watched, new=6)  # kernels are compiled, graphs captured and buffers grown on the way
    while watched.idle():
        pass
    watched.armed, watched.launches = True, 0
    serve(watched, new=6)
    watched.armed = False
    assert watched.launches > 20


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_no_launch_with_images_synchronises(tmp_path: Path, family: str) -> None:
    """Images of sizes that were not seen before among them, in chunks beside decodes."""
    model = make(family, tmp_path)
    settings = {"dtype": "bfloat16", "max_running_requests": ROWS, "max_total_tokens": 4096, "chunked_prefill_size": 32}
    executor = Watched(build_executor(locate(str(tmp_path)), Settings.from_flat(settings)).executor)
    for armed, sizes in ((False, (4, 6)), (False, (6, 4)), (True, (8, 6))):
        executor.armed, executor.launches = armed, 0
        bench = Bench(executor, enable_mixed_chunk=True)  # type: ignore[arg-type]
        for i in range(6):
            images = [patches(1, *sizes, seed=100 * sizes[0] + i), patches(1, 4, 4, seed=100 * sizes[0] + i)]
            ids, spans = model.prompt(words(9 + i, i), images)
            tokens, media = model.media(tmp_path, ids, spans, images)
            bench.ask(i, tokens, max_new_tokens=8, temperature=0.0, ignore_eos=True, media=media)
            bench.turn(2)
        bench.run()
        while not armed and executor.idle():
            pass
    assert executor.launches > 10
    executor.armed = False
    executor.close()


LATE: dict[str, list[dict[str, Any]]] = {  # what is asked behind the sleep, beside rows that decode
    "decodes alone": [],
    "prompts": [{"temperature": 0.0}, {"top_p": 0.9, "frequency_penalty": 0.5, "seed": 17}],
    "a prompt with logprobs": [{"logprobs": LogprobRequest(0, 2, (3,)), "repetition_penalty": 1.1, "seed": 15}],
}


@pytest.mark.parametrize("late", LATE)
def test_a_launch_returns_while_the_device_is_busy(watched: Watched, late: str) -> None:
    """What torch does not see (drivers, kernel launchers) does not wait either. The same load runs once without the
    sleep: code that is loaded when it is first used may wait for the device, once."""
    serve(watched, new=6)
    while watched.idle():
        pass
    for asleep in (False, True):
        bench = Bench(watched)  # type: ignore[arg-type]
        early = SAMPLING[: ROWS - len(LATE[late])]
        for i, kind in enumerate(early):
            bench.ask(i, prompt_of(i), max_new_tokens=30, ignore_eos=True, **kind)
        bench.turn(12)  # prompts are through
        torch.cuda.synchronize()
        if asleep:
            torch.cuda._sleep(SLEEP_CYCLES)
        over = torch.cuda.Event()
        over.record()
        for i, kind in enumerate(LATE[late], start=len(early)):
            bench.ask(i, prompt_of(i), max_new_tokens=30, ignore_eos=True, **kind)
        bench.scheduler._depth = 3
        bench.turn(2)
        if asleep:
            assert not over.query(), "two steps were launched behind the sleep, and the device has come to neither"
        bench.scheduler._depth = 1
        bench.run()


def prompt_of(i: int) -> list[int]:
    return [(5 * i + j) % 900 for j in range(20)]
