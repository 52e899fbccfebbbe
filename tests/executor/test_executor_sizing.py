"""How large the KV cache becomes, and what is said when it cannot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bough.core.errors import ResourceError
from bough.core.model_config import ModelConfig, RecurrentConfig, RopeConfig
from bough.core.settings import MemorySettings, Settings
from bough.executor.load_model import resolve_chunk
from bough.executor.machine import free_memory_bytes, usable_cores
from bough.executor.sizing import CacheShape, CacheSize, default_rows, size_cpu_cache, size_gpu_cache
from bough.loader.config import read_config
from bough.loader.locate import locate

GIB = 2**30
CONFIG = ModelConfig("LlamaForCausalLM", 24, 40, 2, 4, 2, 8, 60, 64, 1e-5, RopeConfig(10000.0))


def size(settings: MemorySettings, free: int = 8 * GIB, context: int = 1000) -> CacheSize:
    return size_cpu_cache(
        settings, free_bytes=free, weight_bytes=2 * GIB, shape=CacheShape(2**20), context_length=context
    )


def test_the_smaller_of_a_quarter_of_memory_and_32_contexts() -> None:
    assert size(MemorySettings()).pages == (2048,) and "quarter" in size(MemorySettings()).note
    small = size(MemorySettings(), context=10)
    assert small.pages == (320,) and "32 times the context" in small.note


def test_the_user_decides() -> None:
    assert size(MemorySettings(max_total_tokens=500)).pages == (500,)
    assert size(MemorySettings(max_total_tokens=500, page_size=16)).pages == (31,)
    assert size(MemorySettings(mem_fraction_static=0.5)).pages == (3072,)  # half of 10 GiB, less 2 GiB of weights


@pytest.mark.parametrize(
    ("settings", "free", "words"),
    [
        (MemorySettings(max_total_tokens=10**6), 8 * GIB, "set it to 8192 or less"),
        (MemorySettings(mem_fraction_static=0.1), 8 * GIB, "raise it"),
        (MemorySettings(), 2**20, "free some memory"),
    ],
)
def test_what_does_not_fit_says_what_to_set(settings: MemorySettings, free: int, words: str) -> None:
    with pytest.raises(ResourceError, match=words):
        size(settings, free)


def test_container_limits_count(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert free_memory_bytes(tmp_path) == 600_000
    assert usable_cores(tmp_path) == 1


def test_what_is_only_remembered_of_files_is_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 200000\ninactive_file 500000\nactive_file 100000\n")
    assert free_memory_bytes(tmp_path) == 600_000


@pytest.mark.parametrize("limited", ["user.slice", "user.slice/bough.service"])
def test_limits_of_a_service_count_without_a_container(tmp_path: Path, limited: str) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/user.slice/bough.service\n")
    (tmp_path / "user.slice" / "bough.service").mkdir(parents=True)
    (tmp_path / limited / "cpu.max").write_text("100000 100000\n")
    (tmp_path / limited / "memory.max").write_text("1000000\n")
    (tmp_path / limited / "memory.current").write_text("400000\n")
    assert usable_cores(tmp_path, membership) == 1
    assert free_memory_bytes(tmp_path, membership) == 600_000


def test_limits_of_the_older_control_groups_count(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("4:cpu,cpuacct:/box\n3:memory:/box\n1:name=systemd:/../elsewhere\n")
    for controller, files in {
        "cpu": {"cpu.cfs_quota_us": "100000", "cpu.cfs_period_us": "100000"},
        "memory": {
            "memory.limit_in_bytes": "1000000",
            "memory.usage_in_bytes": "900000",
            "memory.stat": "total_inactive_file 500000",
        },
    }.items():
        group = tmp_path / controller / "box"
        group.mkdir(parents=True)
        for name, content in files.items():
            (group / name).write_text(content)
    assert usable_cores(tmp_path, membership) == 1
    assert free_memory_bytes(tmp_path, membership) == 600_000


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert free_memory_bytes(tmp_path) > 1_000_000
    assert usable_cores(tmp_path) >= 1


def gpu_size(settings: MemorySettings, free: int = 100 * GIB, step: int = 10 * GIB) -> CacheSize:
    return size_gpu_cache(
        settings, free_bytes=free, total_bytes=140 * GIB, activation_bytes=step, shape=CacheShape(2**20)
    )


def test_a_gpu_gives_its_fraction_less_weights_and_never_what_a_step_needs() -> None:
    assert gpu_size(MemorySettings()).pages == ((100 - 14) * 1024,) and "90%" in gpu_size(MemorySettings()).note
    assert gpu_size(MemorySettings(), step=20 * GIB).pages == ((100 - 20) * 1024,)
    assert gpu_size(MemorySettings(mem_fraction_static=0.5)).pages == ((100 - 70) * 1024,)
    assert gpu_size(MemorySettings(mem_fraction_static=1.0)).pages == ((100 - 10) * 1024,)
    assert gpu_size(MemorySettings(max_total_tokens=1000, page_size=16)).pages == (62,)


@pytest.mark.parametrize(
    ("settings", "step", "words"),
    [
        (MemorySettings(max_total_tokens=10**6), 10 * GIB, "set it to"),
        (MemorySettings(), 100 * GIB, "chunked-prefill-size"),
    ],
)
def test_a_gpu_without_room_says_what_to_set(settings: MemorySettings, step: int, words: str) -> None:
    with pytest.raises(ResourceError, match=words):
        gpu_size(settings, step=step)


@pytest.mark.parametrize(
    ("flags", "chunk"),
    [
        ({}, 256),
        ({"chunked_prefill_size": 100}, 100),
        ({"chunked_prefill_size": -1}, 512),  # the context
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 300}, 300),
        ({"max_prefill_tokens": 8, "page_size": 16}, 16),
    ],
)
def test_no_step_is_made_ready_that_the_scheduler_would_not_ask_for(
    tiny_model: Path, flags: dict[str, int], chunk: int
) -> None:
    assert resolve_chunk(Settings.from_flat(flags), read_config(locate(str(tiny_model)), {}), 256) == chunk


def test_windows_take_their_share_and_no_more_than_the_rows_can_use() -> None:
    """Full attention takes 1 MiB a token, windows 5 MiB; 10 GiB in all."""
    by_ratio = CacheShape(2**20, 5 * 2**20, ratio=0.5, least_window=10, most_window=10**6)
    tokens = by_ratio.fitting(10 * GIB)
    assert by_ratio.nbytes(tokens) <= 10 * GIB < by_ratio.nbytes(tokens + 1)
    assert by_ratio.window_tokens(tokens) == -(-tokens // 2)
    few_rows = CacheShape(2**20, 5 * 2**20, ratio=0.5, least_window=10, most_window=100)
    assert few_rows.fitting(10 * GIB) == 10 * 1024 - 5 * 100
    tight = CacheShape(2**20, 5 * 2**20, ratio=0.5, least_window=2000, most_window=10**6)
    assert tight.window_tokens(tight.fitting(11 * GIB)) == 2000
    assert tight.fitting(9 * GIB) == 0  # not even one row has its window


def test_without_full_attention_the_windows_decide() -> None:
    shape = CacheShape(0, 2**20, ratio=0.5, least_window=10, most_window=10**6)
    assert shape.fitting(GIB) == 2048 and shape.window_tokens(2048) == 1024


STATES = RecurrentConfig((True, True), heads=16, value_dim=128, conv_width=1, key_dim=128)  # 2 MiB a page


def test_states_take_what_the_rows_need_and_leave_the_rest_to_attention() -> None:
    config = replace(CONFIG, recurrent=STATES)
    shape = CacheShape.of(config, (2**20,), MemorySettings(), rows=8, chunk_tokens=16)
    assert (shape.state_bytes, shape.states, shape.nbytes(10)) == (2 * 2**20, 16, (32 + 10) * 2**20)
    assert shape.page_bytes(16) == (16 * 2**20, 2 * 2**20)
    assert shape.fitting(GIB) == 1024 - 32 and shape.fitting(2**20) == 0
    made = CacheSize.of(shape, 100, 16, "somewhere")
    assert made.pages == (6, 16) and "recurrent layers have 16 states (0.03 GiB)" in made.note


def test_a_window_beside_states_keeps_its_group() -> None:
    windows = replace(CONFIG, sliding_window=8, sliding_layers=(True, False), recurrent=STATES)
    shape = CacheShape.of(windows, (2**20, 2**20), MemorySettings(), rows=8, chunk_tokens=16)
    assert [group.kind for group in windows.kv_groups] == ["full", "window", "state"]
    assert len(CacheSize.of(shape, 100, 1, "").pages) == len(shape.page_bytes(1)) == 3


@pytest.mark.parametrize(("memory", "rows"), [(GIB, 128), (100 * GIB, 512), (2**20, 1)])
def test_as_many_rows_run_as_have_their_states_in_half_of_the_memory(memory: int, rows: int) -> None:
    assert default_rows(replace(CONFIG, recurrent=STATES), 512, memory) == rows
    assert default_rows(CONFIG, 512, memory) == 512
