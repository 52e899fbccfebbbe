"""The tree's benchmark: its load is what it says, and its table prints. How fast it is, is not a test's business."""

from __future__ import annotations

import pytest

from bough.cli.main import main
from tests.bench.tree import SHARED_PREFIXES, make_prompts, run


def test_prompts_share_the_asked_fraction() -> None:
    prompts = make_prompts(prompts=500, length=20, shared=0.25, seed=1)
    assert prompts.shape == (500, 20)
    assert len({row[:5].tobytes() for row in prompts}) <= SHARED_PREFIXES
    assert len({row[:6].tobytes() for row in prompts}) > SHARED_PREFIXES


@pytest.mark.parametrize("page_size", [1, 4])
def test_all_that_is_cached_is_evicted(page_size: int) -> None:
    figures = run(prompts=300, length=40, shared=0.5, page_size=page_size)
    assert 0 < figures["cached_fraction"] <= 0.6
    assert 300 <= figures["nodes"] <= 300 + SHARED_PREFIXES
    assert figures["snapshot_bytes"] > 6 * figures["nodes"], "six columns with a figure of each"
    assert figures["pages_evicted"] == round((1 - figures["cached_fraction"]) * 300 * 40 / page_size)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--prompts 0", "--prompts must be at least 1, got 0."),
        ("--prompts -5", "--prompts must be at least 1, got -5."),
        ("--length 0", "--length must be at least 1, got 0."),
        ("--page-size 0", "--page-size must be at least 1, got 0."),
        ("--length 8 --page-size 16", "--page-size 16 is more than --length 8."),
        ("--shared 1.5", "--shared must be between 0 and 1, got 1.5."),
    ],
)
def test_what_cannot_be_measured_is_refused(flags: str, complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tree", *flags.split()]) == 2
    assert capsys.readouterr().err == f"bough: {complaint}\n"
