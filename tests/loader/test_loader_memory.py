"""Loading holds little beside the model itself: weights are mapped, and converted a piece at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOST = 1.3  # times what the weights occupy, everything counted that loading touches, the mapped file too

PROGRAM = """
import re, torch
from pathlib import Path
from bough.distributed.topology import Topology
from bough.loader.config import read_config
from bough.loader.load import load_weights, open_source
from bough.loader.locate import locate
from bough.models.registry import build_model

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

files = locate(None)
config = read_config(files)
torch.randn(300, 300) @ torch.randn(300, 300)  # what the libraries take for themselves is not loading
model = build_model(config, Topology(), torch.float32, torch.device("cpu"))
slots = list(model.slots())
before = peak_kib()
load_weights(slots, open_source(files, config), progress=False, device=torch.device("cpu"))
print((peak_kib() - before) * 1024 / sum(slot.target.nbytes for slot in slots))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the kernel's account of a process")
def test_the_peak_is_little_more_than_the_weights() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) <= MOST, done.stdout
