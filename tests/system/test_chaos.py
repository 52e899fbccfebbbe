"""The chaos script, a short run of it: no request is lost, no output differs, and what was taken is given back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.long
def test_a_fleet_survives_what_is_done_to_it(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.system.chaos", "--minutes", "3", "--out", str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True)
    assert ended.returncode == 0, f"{ended.stdout[-5000:]}{ended.stderr[-5000:]}"
    facts = json.loads((tmp_path / "chaos.json").read_text())
    assert facts["totals"]["lost"] == facts["totals"]["differs"] == 0 < facts["totals"]["right"]
    assert len(facts["faults"]) > 5 and (tmp_path / "chaos.png").stat().st_size
