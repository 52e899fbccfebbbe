"""Every kernel compiles for NVIDIA's and AMD's devices, none of which need be there, and fits their shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bough.kernels.decode_attention import triton as decode
from bough.kernels.invariant_attention import triton as invariant
from bough.kernels.invariant_linear import triton as invariant_tiling
from bough.kernels.prefill_attention import triton as prefill
from bough.kernels.skinny_linear.triton import config_for, fitted

SCRIPTS = Path(__file__).parent
AMD, ADA, AMPERE, HOPPER = 65_536, 101_376, 166_912, 232_448  # bytes of shared memory


def run(cache: Path, script: str, *arguments: str) -> str:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "arch"), [("cuda", "90"), ("cuda", "120"), ("hip", "gfx942")]
)  # the one on which figures are taken, and those with the least room
def test_every_kernel_compiles_and_fits(kind: str, arch: str, tmp_path: Path) -> None:
    assert run(tmp_path, "compile_all.py", kind, arch).endswith("all compiled\n")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "arch", "sample"), [("cuda", "90", "largest"), ("hip", "gfx942", "largest")])
def test_a_sample_of_the_kernels_compiles_and_fits(kind: str, arch: str, sample: str, tmp_path: Path) -> None:
    assert run(tmp_path, "compile_all.py", kind, arch, "--sample", sample).endswith("all compiled\n")


@pytest.mark.parametrize("room", [AMPERE, HOPPER])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_tiles_are_those_that_were_tuned_where_there_is_plenty(room: int, dtype: torch.dtype, head_dim: int) -> None:
    wide = dtype == torch.float32
    chosen = prefill.config_for(32, 8, head_dim, dtype, room=room)
    tile = (32, 16, 2) if wide else (128, 64, 2 if head_dim > 128 else 3)
    assert (chosen.block_m, chosen.block_n, chosen.num_stages) == tile
    fixed = invariant.config_for(32, 8, head_dim, dtype, room=room)
    tile = (32, 16, 2) if wide else (64, 32, 2) if head_dim > 128 else (64, 64, 3)
    assert (fixed.block_m, fixed.block_n, fixed.num_stages) == tile
    assert decode.config_for(head_dim, 4, dtype, room=room).num_stages == 3


@pytest.mark.parametrize("room", [AMD, ADA])
def test_wide_heads_take_smaller_tiles_where_there_is_less(room: int) -> None:
    chosen = prefill.config_for(32, 8, 256, torch.bfloat16, room=room)
    assert (chosen.block_m, chosen.block_n) == (64, 32)
    chosen = prefill.config_for(32, 8, 128, torch.bfloat16, room=room)
    assert (chosen.block_m, chosen.num_stages) == (128, 3 if room == ADA else 2)


@pytest.mark.parametrize("room", [ADA, AMPERE, HOPPER])
@pytest.mark.parametrize("n", [512, 14_336, 151_936])
def test_skinny_products_keep_their_tiles_in_flight_on_nvidias_devices(room: int, n: int) -> None:
    cut = config_for(12, n, 4096)
    assert fitted(cut, 2, room) is cut


@pytest.mark.parametrize("rows", [4, 100, 2048])
@pytest.mark.parametrize("n", [512, 14_336])
def test_invariant_products_keep_as_many_tiles_in_flight_as_fit(rows: int, n: int) -> None:
    cut = invariant_tiling.config_for(rows, n, 4096)
    assert invariant_tiling.fitted(cut, 2, HOPPER) is cut
    for room in (AMD, ADA):
        fitting = invariant_tiling.fitted(cut, 2, room)
        tile = fitting.tile
        assert 1 <= tile.num_stages <= cut.tile.num_stages
        assert tile.num_stages * (tile.block_m + tile.block_n) * tile.block_k * 2 <= room
        assert replace(fitting, tile=replace(tile, num_stages=cut.tile.num_stages)) == cut  # nothing else is changed


def test_no_kernel_is_compiled_while_the_engine_answers(tmp_path: Path) -> None:
    assert run(tmp_path, "count_compilations.py") == "nothing is compiled late\n"


def test_kernels_compile_with_a_triton_that_lacks_nvidias_part(tmp_path: Path) -> None:
    code = """
import sys, triton
sys.modules["triton.language.extra.cuda"] = None  # importing it fails
import compile_all
compile_all.compile_launches(compile_all.GPUTarget("hip", "gfx942", 64))
x = compile_all.torch.zeros(4, 64)
compile_all.rms_norm(x, x[0], 1e-5)
"""
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.startswith("_rms_norm: "), done.stderr
