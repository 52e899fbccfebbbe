"""Traces of what the scheduler process does, recorded with torch's own profiler."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

import pytest
import torch

from bough.core.control import ProfileStart
from bough.core.errors import RequestError
from bough.executor.control import TorchProfiler


def test_every_recording_has_a_file_of_its_own(tmp_path: Path) -> None:
    profiler = TorchProfiler()
    written = set()
    for _ in range(3):
        profiler.start(ProfileStart(output_dir=str(tmp_path), activities=("CPU",)))
        torch.ones(3).sum()
        written.add(profiler.stop())
    assert len(written) == 3 and {str(path) for path in tmp_path.iterdir()} == written


def test_a_recording_without_a_folder_gets_one_that_nobody_else_can_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    profiler = TorchProfiler()
    profiler.start(ProfileStart(activities=("CPU",)))
    folder = Path(profiler.stop()).parent
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to record")
@pytest.mark.parametrize("name", ["GPU", "CUDA"])
def test_a_gpu_that_is_not_there_cannot_be_recorded(name: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no GPU"):
        TorchProfiler().start(ProfileStart(output_dir=str(tmp_path), activities=(name,)))


def test_both_are_recorded_as_far_as_they_are_there(tmp_path: Path) -> None:
    profiler = TorchProfiler()
    profiler.start(ProfileStart(output_dir=str(tmp_path), activities=("CPU", "GPU")))
    torch.ones(3).sum()
    assert b"aten::sum" in gzip.decompress(Path(profiler.stop()).read_bytes())


@pytest.mark.parametrize("path", ["/tmp/a\0b", "/tmp/\ud800", "~nobody-of-that-name/x"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(RequestError, match="output_dir is no path: "):
        TorchProfiler().start(ProfileStart(output_dir=path))
