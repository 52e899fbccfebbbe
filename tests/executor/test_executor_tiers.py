"""Pages of every kind come back from the host and from a store as they went: the same logprobs, to the last bit."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast
from unittest.mock import patch

import pytest

from bough.core.plan import Executor
from bough.core.settings import WRITE_POLICIES, MemorySettings, Settings
from bough.executor.build import build_executor
from bough.loader.locate import locate
from bough.messages.ranks import CopyPages, ToRank
from bough.messages.requests import LogprobRequest
from bough.native.library import load_library
from bough.storage.files import FOLDER_VARIABLES, Files
from bough.storage.store import Store
from bough.storage.tier import StoreTier, Transfers
from tests.executor.test_executor_pipelines import CONFIGS
from tests.executor.test_executor_ranks import Orders, with_ranks
from tests.fakes.checkpoints import write_checkpoint
from tests.fakes.scheduler_bench import Bench
from tests.storage.test_storage_tier import SlowThread

PROMPT = [5, 9, 2, 7, 1, 8, 3, 3, 6, 4, 5, 1, 2, 2, 7, 9, 11, 4]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama bf16": {"kv_cache_dtype": "bf16"},
    "llama pages": {"page_size": 4},
    "latent": {},
    "sparse": {},  # queries attend to 6 of the tokens, which keys in the pages choose
    "windows": {},
    "states": {},
}


def answers(bench: Bench, prompts: list[list[int]]) -> list[tuple[int, int | None, list[int], list[float]]]:
    """Of requests one after the other: cached tokens, those from the host, and what was sampled with which logprobs."""
    found = []
    for prompt in prompts:
        handle = len(bench.out.started)
        options = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
        bench.ask(handle, prompt, logprobs=LogprobRequest(), **options)
        bench.run()
        started = bench.out.started[handle]
        found.append((started.cached_tokens, started.host_tokens, bench.out.outputs[handle], bench.out.scores[handle]))
    return found


def round_trip(executor: Executor, policy: str = "write_through") -> None:
    """The second request finds the prompt on the device, the last one on the host alone. Both compute one token more,
    which the first has not."""
    memory = MemorySettings(hicache_write_policy=policy)
    pages, host = tuple(4 * count for count in executor.limits().pages), getattr(executor, "host", None)
    bench = Bench(cast(Any, executor), memory=memory, **({"host": host} if host else {"host_pages": pages}))
    _, again, *_, last = answers(bench, [PROMPT, [*PROMPT, 2], [17] * 40, [18] * 40, [*PROMPT, 2]])
    assert again[0] >= 16 and again[1] == 0
    assert last[:2] == (again[0], again[0]), "all of it came from the host"
    assert last[2:] == again[2:] and len(last[3]) == 6


def through_a_store(executor: Executor) -> None:
    """Another engine finds 16 tokens on disk, and computes the last one as if they had been on the device."""
    prompt = PROMPT[:17]
    with (
        TemporaryDirectory() as folder,
        patch.dict(os.environ, {FOLDER_VARIABLES[0]: folder}),
        patch("bough.storage.store.RUN_TOKENS", 8),
        patch("bough.storage.tier.RUN_TOKENS", 8),
    ):
        _, again = answers(bench_over_files(executor), [prompt, prompt])
        ((cached, host, *found),) = answers(bench_over_files(executor), [prompt])
        files = [path for path in Path(folder).iterdir() if not path.name.startswith(".")]
    states = sum(group.kind == "state" for group in executor.limits().groups)
    assert again[:2] == (16, 0) and (cached, host) == (16, 16) and len(files) == 2 * (1 + states)
    assert found == [*again[2:]]


def bench_over_files(executor: Executor) -> Bench:
    transfers = Transfers(Store(Files()), 1 << 20)
    transfers._reader, transfers._writer = SlowThread(), SlowThread()  # type: ignore[assignment]
    limits, memory = executor.limits(), MemorySettings(hicache_storage_backend="file")
    tier = StoreTier(limits, memory, [])
    tier.transfers = transfers
    return Bench(cast(Any, executor), memory=memory, host_pages=limits.pages, handover=lambda _, out: (tier, out))


@pytest.mark.parametrize("backend", ["torch", "native"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_changes_no_bit(kind: str, backend: str, tmp_path: Path) -> None:
    if backend == "native" and (load_library() is None or kind in ("states", "sparse")):
        pytest.skip("not with the CPU kernels")
    model = kind.split()[0]
    layers = {} if model == "states" else {"num_hidden_layers": 4}
    folder = write_checkpoint(tmp_path / "model", 3, **CONFIGS[model], **layers)
    flat = {
        "device": "cpu",
        "cpu_threads": 1,
        "attention_backend": backend,
        "max_total_tokens": 64,
        "max_running_requests": 2,
        "chunked_prefill_size": 8,
        **KINDS[kind],
    }
    executor = build_executor(locate(str(folder)), Settings.from_flat(flat)).executor
    round_trip(executor)
    through_a_store(executor)
    executor.close()


@pytest.mark.parametrize("host_pages", [0, 256])
@pytest.mark.parametrize("policy", WRITE_POLICIES)
def test_the_parts_of_all_ranks_come_back(policy: str, host_pages: int, tmp_path: Path) -> None:
    """From the first rank's memory, or from that of each."""
    folder = write_checkpoint(tmp_path / "model", 3, **CONFIGS["llama"])
    flags = {"max_total_tokens": 64, "max_running_requests": 2, "chunked_prefill_size": 8}
    with_ranks(folder, 2, partial(round_trip, policy=policy), host_pages=host_pages, **flags)


@pytest.mark.parametrize(
    ("model", "size", "stages"),
    [("latent", 2, 1), ("windows", 2, 1), ("llama", 1, 2), ("latent", 1, 2), ("llama", 2, 2)],
)
def test_each_rank_keeps_its_own_part(model: str, size: int, stages: int, tmp_path: Path) -> None:
    """Nothing of pages is sent to a rank, of a stage or of several."""
    sent = list[ToRank]()

    class Noted(Orders):
        def send(self, message: Any) -> None:
            sent.append(message)
            super().send(message)

    folder = write_checkpoint(tmp_path / "model", 3, **CONFIGS[model], num_hidden_layers=4)
    flags = {"max_total_tokens": 64, "max_running_requests": 2, "chunked_prefill_size": 8}
    with_ranks(folder, size, round_trip, stages=stages, way=Noted, host_pages=256, **flags)
    copies = [message for message in sent if isinstance(message, CopyPages)]
    assert {copy.inward for copy in copies} == {True, False}
    assert all(copy.content is None and copy.slots is not None for copy in copies)


def test_the_parts_of_all_ranks_come_back_from_a_store(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", 3, **CONFIGS["llama"])
    with_ranks(folder, 2, through_a_store, max_total_tokens=64, max_running_requests=2)
