"""Loading holds little beside the model itself: weights are mapped, and converted a piece at a time.

On the way to a GPU the host holds no more than the mapped file, which the system takes back when it needs the room.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
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
from bough.loader.gguf_file import GgufFile
from bough.loader import load
from bough.loader.quantization import Quantization
from bough.loader.quantized import QuantizedSource
from bough.loader.source import GgufSource, NamedSource, SafetensorsSource
from bough.models.names import Piece, find_tensors

def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

class Elsewhere:
    values = 0
    def take(self, first, band):  # reads every byte and keeps none, as a copy to a device does
        assert band.max() < 100
        self.values += band.numel()

kind, *names = sys.argv[1:]
torch.ones(300, 300, dtype=torch.bfloat16).sum()
before = peak_kib()
if kind == "gguf":
    source = GgufSource(GgufFile.open(Path(names[0])))
else:
    source = files = SafetensorsSource([Path(name) for name in names])
    if kind == "experts":
        planes = [Piece(f"m.*.{expert}", plane=expert) for expert in range(8)]
        source = NamedSource(files, find_tensors({"m.*": planes}, files.names(), keep_others=False))
    elif kind != "plain":
        source = QuantizedSource(files, Quantization(kind, kind, zero_shift=1), torch.bfloat16)
elsewhere = Elsewhere()
shapes = {name: source.shape(name) for name in source.names()}
targets = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
slots = [WeightSlot(name, target, (), elsewhere.take) for name, target in targets.items()]
load.PIECE_VALUES = 1 << 20
load.load_weights(slots, source, progress=False, device=torch.device("cpu"))
assert elsewhere.values == sum(target.numel() for target in targets.values())
print((peak_kib() - before) << 10)
"""
SHARDS, SIDE = 4, 2048
ALLOWED = 60 << 20  # beside the largest file: what a piece of a tensor needs while it is converted


def write_shards(kind: str, folder: Path) -> list[Path]:
    """Files of 32 MiB, of `kind`."""
    if kind == "gguf":
        writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=1)
        for number in range(SHARDS):
            blocks = np.zeros((2 * SIDE, SIDE // 32 * 34 * 4), np.uint8)
            writer.add_tensor(f"m.{number}", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return sorted(folder.iterdir())
    paths = [folder / f"{number}.safetensors" for number in range(SHARDS)]
    for number, path in enumerate(paths):
        save_file(tensors_of(kind, number), path)
    return paths


def tensors_of(kind: str, shard: int) -> dict[str, torch.Tensor]:
    integers = torch.zeros(SIDE, 2 * SIDE, dtype=torch.int32)
    few = {"scales": torch.ones(SIDE // 128, SIDE * 16), "qzeros": torch.zeros(SIDE // 128, SIDE * 2).int()}
    parts = {
        "plain": {f"{part}.weight": torch.ones(SIDE, SIDE, dtype=torch.bfloat16) for part in "abcd"},
        "experts": {"": torch.ones(8, SIDE // 2, SIDE, dtype=torch.bfloat16)},
        "fp8": {
            "weight": torch.ones(SIDE * 8, SIDE, dtype=torch.float8_e4m3fn),
            "weight_scale": torch.ones(SIDE * 8, 1),
        },
        "awq": {"qweight": integers, **few},
        "gptq": {"qweight": integers.view(SIDE // 8, -1), **few},
    }[kind]
    return {f"m.{shard}.{name}".removesuffix("."): tensor for name, tensor in parts.items()}


reads_status = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads the kernel's account of a process"
)


@pytest.mark.slow
@reads_status
@pytest.mark.parametrize("kind", ["plain", "experts", "fp8", "awq", "gptq", "gguf"])
def test_the_host_holds_one_file_on_the_way_to_a_device(kind: str, tmp_path: Path) -> None:
    paths = write_shards(kind, tmp_path)
    command = [sys.executable, "-c", PASSING_ON, kind, *map(str, paths)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sizes = [path.stat().st_size for path in paths]
    assert len(sizes) == SHARDS and sum(sizes) > max(sizes) + ALLOWED
    assert int(done.stdout) < max(sizes) + ALLOWED, int(done.stdout) >> 20


@pytest.mark.slow
@reads_status
def test_the_peak_is_little_more_than_the_weights() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) <= MOST, done.stdout
