"""How much of the host's memory the tier takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from bough.core.errors import ResourceError
from bough.core.model_config import FULL_ATTENTION, KVGroup
from bough.core.plan import Limits
from bough.core.settings import Settings
from bough.distributed.group import RankGroup
from bough.executor import host_memory

WINDOW = KVGroup("window", 8)
LIMITS = Limits(4, 2, (100, 40), 64, 60, 8, "", groups=(FULL_ATTENTION, WINDOW), page_bytes=(1000, 500), ranks=2)
DEVICE_BYTES = 2 * (100 * 1000 + 40 * 500)


def shapes(monkeypatch: pytest.MonkeyPatch, free: float = 1e12, **flat: Any) -> list[tuple[int, ...]]:
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: int(free))
    settings = Settings.from_flat({"device": "cpu", "enable_hierarchical_cache": True, **flat})
    return [buffer.shape for buffer in host_memory.host_memory(LIMITS, settings)]


@pytest.mark.parametrize(
    ("flat", "pages"),
    [
        ({}, (200, 80)),
        ({"hicache_ratio": 0.5}, (50, 20)),
        ({"hicache_size": 3 * DEVICE_BYTES / 1e9}, (300, 120)),
    ],
)
def test_each_kind_of_page_gets_its_share_and_ranks_stand_side_by_side(
    monkeypatch: pytest.MonkeyPatch, flat: dict[str, Any], pages: tuple[int, int]
) -> None:
    assert shapes(monkeypatch, **flat) == [(pages[0] + 1, 2000), (pages[1] + 1, 1000)]


def test_replicas_share_four_fifths_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        found = shapes(monkeypatch, free=2.5 * DEVICE_BYTES, dp_size=2)
    assert found == [(101, 2000), (41, 1000)]
    assert "200 tokens" in caplog.text and "capped: 2.00 times" in caplog.text and "pays little" in caplog.text


class Ranks(RankGroup):
    """One of four ranks on two hosts; another has so much less."""

    def __init__(self, *less: int) -> None:
        self.least = iter(less)

    def minimum(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(min(value, next(self.least)) for value in values)


def test_each_rank_has_memory_for_its_own_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a page a half; two replicas on two hosts share the free memory of each, and the smallest has its way."""
    settings = Settings.from_flat({"device": "cpu", "tp_size": 2, "dp_size": 2, "enable_hierarchical_cache": True})
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: int(2.5 * DEVICE_BYTES))
    with caplog.at_level("INFO"):
        buffers = host_memory.own_memory(LIMITS, settings, Ranks(90, 1000))
    assert [buffer.shape for buffer in buffers] == [(91, 1000), (41, 500)]
    assert "180 tokens" in caplog.text


def test_a_size_is_that_of_all_ranks_together(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.from_flat({"device": "cpu", "tp_size": 2, "hicache_size": 3 * DEVICE_BYTES / 1e9})
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: int(1e12))
    buffers = host_memory.host_memory(LIMITS, settings, Ranks(*[10**9] * 2))
    assert [buffer.shape for buffer in buffers] == [(301, 1000), (121, 500)]


def test_with_a_store_the_first_rank_has_all_parts() -> None:
    flat = {"enable_hierarchical_cache": True, "tp_size": 2, "hicache_storage_backend": "file"}
    assert not host_memory.own_memory(LIMITS, Settings.from_flat(flat), Ranks())


def test_a_stage_without_a_kind_of_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.from_flat({"device": "cpu", "pp_size": 2, "enable_hierarchical_cache": True})
    monkeypatch.setattr(host_memory, "free_memory_bytes", lambda: int(1e12))
    with pytest.raises(ResourceError, match="lower --pp-size"):
        host_memory.own_memory(replace(LIMITS, page_bytes=(1000, 0)), settings, Ranks(1000, 1000))


def test_memory_for_less_than_a_page_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match="raise --hicache-size"):
        shapes(monkeypatch, hicache_ratio=0.01)
