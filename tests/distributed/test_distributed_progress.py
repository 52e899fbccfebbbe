"""Which rank keeps the others waiting."""

from __future__ import annotations

from pathlib import Path

from bough.distributed.group import Progress
from bough.distributed.topology import Topology


def test_who_has_begun_fewer_exchanges_of_its_stage_is_late(tmp_path: Path) -> None:
    ranks = [Progress(tmp_path / "progress", Topology(rank % 3, 3, pp_rank=rank // 3, pp_size=2)) for rank in range(6)]
    for rank, count in enumerate((5, 5, 4, 2, 1, 2)):
        for _ in range(count):
            ranks[rank].count()
    assert [rank.late() for rank in ranks] == [[2]] * 3 + [[4]] * 3
    ranks[2].count()
    assert ranks[0].late() == []
