"""Kernels that are compiled before they are launched: in a process of its own, whose Triton does not interpret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_steps_are_walked_through_and_their_kernels_made_ready(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).parent / "compile_side_by_side.py"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.stdout == "as promised\n", done.stderr
