"""Every kernel compiles for NVIDIA's and AMD's devices, none of which need be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "arch"), [("cuda", "90"), ("cuda", "80"), ("hip", "gfx942"), ("hip", "gfx90a")])
def test_every_kernel_compiles(kind: str, arch: str, tmp_path: Path) -> None:
    script = Path(__file__).parent / "compile_all.py"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script, kind, arch], env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("all compiled\n"), f"{done.stdout}\n{done.stderr[-3000:]}"
