"""Loading holds little beside the model itself: weights are mapped, and converted a piece at a time.

On the way to a GPU the host holds no more than the mapped file, which the system takes back when it needs the room.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

# PyTorch's allocator on ARM keeps what is freed for a while; what it keeps is not held by loading.
ENVIRONMENT = {**os.environ, "MIMALLOC_PURGE_DELAY": "0"}
MOST = 1.3  # times what the weights occupy, everything counted that loading touches, the mapped file too

# Huge pages are off: PyTorch asks for them on ARM, and an empty tensor then occupies 2 MB before anything is loaded.
PROGRAM = """
import ctypes, re, torch
from pathlib import Path
from bough.distributed.topology import Topology
from bough.loader.config import read_config
from bough.loader.load import load_weights, open_source
from bough.loader.locate import locate
from bough.models.registry import build_model

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

PR_SET_THP_DISABLE = 41
assert ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0
files = locate(None)
config = read_config(files)
torch.randn(300, 300) @ torch.randn(300, 300)  # what the libraries take for themselves is not loading
model = build_model(config, Topology(), torch.float32, torch.device("cpu"))
slots = list(model.slots())
before = peak_kib()
load_weights(slots, open_source(files, config), progress=False, device=torch.device("cpu"))
print((peak_kib() - before) * 1024 / sum(slot.target.nbytes for slot in slots))
"""


PASSING_ON = """
import re, sys, torch
from pathlib import Path
from bough.layers.weights import WeightSlot
from bough.loader.load import load_weights
from bough.loader.source import SafetensorsSource

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

class Elsewhere:
    total = 0.0
    def take(self, first, band):  # reads every byte and keeps none, as a copy to a device does
        self.total += float(band.sum())

path, elsewhere = Path(sys.argv[1]), Elsewhere()
source = SafetensorsSource([path])
target = torch.empty(source.shape("m0"), dtype=torch.bfloat16, device="meta")
torch.ones(300, 300, dtype=torch.bfloat16).sum()
before = peak_kib()
slots = [WeightSlot(name, target, (), elsewhere.take) for name in source.names()]
load_weights(slots, source, progress=False, device=torch.device("cpu"))
assert elsewhere.total == len(slots) * target.numel(), elsewhere.total
print((peak_kib() - before) * 1024 / path.stat().st_size)
"""

reads_status = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads the kernel's account of a process"
)


@pytest.mark.slow
@reads_status
def test_weights_on_their_way_to_a_device_are_not_doubled(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"m{i}": torch.ones(4096, 4096, dtype=torch.bfloat16) for i in range(4)}, path)  # 128 MiB
    command = [sys.executable, "-c", PASSING_ON, str(path)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert float(done.stdout) <= MOST, done.stdout


@pytest.mark.slow
@reads_status
def test_the_peak_is_little_more_than_the_weights() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) <= MOST, done.stdout
