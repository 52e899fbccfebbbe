"""`--check-ranks` finds the rank that differs, and names it, in each way that ranks can stand beside each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from bough.core.errors import EngineDeadError
from bough.distributed.group import ALONE, RankGroup
from bough.executor.plain_plans import decode_plan
from bough.executor.rank_check import RankCheck, make_check
from tests.fakes.ranks import attention_groups, thread_groups

CPU = torch.device("cpu")


class Tables:
    """What a rank has of its rows."""

    def __init__(self, page: int) -> None:
        self._page = page

    def held_by(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.array([self._page, 8]), np.array([2]), np.array([2])


def step(group: RankGroup, differs: int, what: str) -> str:
    """What the rank says of a step in which one of them differs."""
    check, odd = RankCheck(group, CPU), group.topology.rank == differs
    try:
        tables: Any = Tables(90 if odd and what == "pages" else 7)
        check.rows(decode_plan(412, 1, 1), tables)
        if group.topology.is_last:
            sampled = torch.tensor([3, 17 if odd and what == "token" else 20])
            assert check.tokens(sampled).tolist() == [3, 20]
    except EngineDeadError as error:
        return str(error)
    return ""


WAYS: dict[str, tuple[Any, int, str, list[str]]] = {  # the ranks, which differs in what, and what each says
    "tensor parallel, pages": (lambda: thread_groups(3), 2, "pages", ["Rank 2 differs from rank 0"] * 3),
    "tensor parallel, tokens": (lambda: thread_groups(2), 1, "token", ["Rank 1 differs from rank 0"] * 2),
    "stages": (lambda: thread_groups(1, stages=3), 1, "pages", ["", "Rank 1 differs from rank 0", "nothing came"]),
    "the last stage": (lambda: thread_groups(1, stages=3), 2, "pages", ["", "", "Rank 2 differs from rank 1"]),
    "a rank of a stage": (
        lambda: thread_groups(2, stages=2),
        3,
        "token",
        ["", "", *["Rank 3 differs from rank 2"] * 2],
    ),
    "groups, pages": (lambda: attention_groups(2, 2), 3, "pages", ["", "", *["Rank 3 differs from rank 2"] * 2]),
    "groups, tokens": (lambda: attention_groups(2, 2), 1, "token", [*["Rank 1 differs from rank 0"] * 2, "", ""]),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_rank_that_differs_is_named(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fakes.ranks.PATIENCE_S", 1.0)  # of a stage behind one that has found a difference
    make, differs, what, expected = WAYS[way]
    groups = make()
    with ThreadPoolExecutor(len(groups)) as threads:
        said = list(threads.map(lambda group: step(group, differs, what), groups))
    for text, words in zip(said, expected, strict=True):
        assert text.startswith(words) and bool(text) == bool(words)
    place = {"pages": "the digest of the page tables is ", "token": "sampled token 1 is 17, not 20"}[what]
    told = [text for text in said if "differs" in text]
    assert told and all(f" in step 412: {place}" in text and text.endswith("(--check-ranks).") for text in told)


def test_ranks_that_have_nothing_alike_compare_nothing() -> None:
    for group in (ALONE, *attention_groups(2, 1)):  # groups have requests of their own
        assert make_check(True, group, CPU) is None
    for group in (*thread_groups(2), *thread_groups(1, stages=2), *attention_groups(2, 2)):
        assert make_check(True, group, CPU) is not None and make_check(False, group, CPU) is None
