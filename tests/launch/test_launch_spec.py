"""What processes are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from bough.launch.spec import ChildSpec
from bough.loader.locate import ModelFiles
from bough.messages.channels import Addresses


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "rank", "title"),
    [
        (2, 1, 1, "executor TP1"),
        (1, 2, 1, "executor PP1 TP0"),
        (2, 2, 1, "executor PP0 TP1"),
        (2, 2, 3, "executor PP1 TP1"),
    ],
)
def test_a_rank_shows_its_place(tp_size: int, pp_size: int, rank: int, title: str) -> None:
    settings, files = {"tp_size": tp_size, "pp_size": pp_size}, ModelFiles(name="model", folder=Path("model"))
    assert ChildSpec("executor", settings, Addresses.in_folder(Path("folder")), files, rank=rank).title == title
