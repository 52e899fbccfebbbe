from __future__ import annotations

from pathlib import Path

import pytest

from bough.cli.main import main
from bough.loader import catalogue
from bough.models.registry import supported_architectures

Capture = pytest.CaptureFixture[str]
DEFAULT = catalogue.DEFAULT


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BOUGH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


NAMES = f"{DEFAULT.name}, all-MiniLM-L6-v2, whisper-tiny.en"


def put_model() -> Path:
    path = catalogue.home() / "models" / DEFAULT.name / DEFAULT.source.file_name
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(DEFAULT.size)  # sparse: takes no disk
    return path


@pytest.mark.parametrize("argv", [["models"], ["models", "list"]])
def test_the_table_shows_what_is_not_fetched(argv: list[str], home: Path, capsys: Capture) -> None:
    assert main(argv) == 0
    head, row, vectors, sound, _, foot = capsys.readouterr().out.splitlines()
    assert head.split() == ["NAME", "SIZE", "LICENCE", "ON", "DISK"]
    assert row.split() == [DEFAULT.name, "(default)", "98", "MB", "Apache-2.0", "not", "fetched"]
    assert vectors.split() == ["all-MiniLM-L6-v2", "91", "MB", "MIT", "not", "fetched"]
    assert sound.split() == ["whisper-tiny.en", "76", "MB", "MIT", "not", "fetched"]
    assert str(home / "models") in foot


def test_the_table_shows_where_a_model_lies(capsys: Capture) -> None:
    path = put_model()
    assert main(["models"]) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith(f"  {path}")


def test_pull_of_a_present_model_fetches_nothing(capsys: Capture) -> None:
    path = put_model()
    assert main(["models", "pull", "smollm2"]) == 0
    assert capsys.readouterr().out == f"{DEFAULT.name} is on disk already: {path}\n"


def test_pull_fetches_by_any_name(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    pulled: list[catalogue.Entry] = []

    def pull(entry: catalogue.Entry) -> Path:
        pulled.append(entry)
        return home / "file.gguf"

    monkeypatch.setattr(catalogue, "pull", pull)
    assert main(["models", "pull", "SMOLLM2"]) == 0
    assert pulled == [DEFAULT]
    assert capsys.readouterr().out == f"{DEFAULT.name} is ready: {home / 'file.gguf'}\n"


def test_rm_removes_and_is_harmless_twice(capsys: Capture) -> None:
    path = put_model()
    assert main(["models", "rm", DEFAULT.name]) == 0
    assert not path.exists()
    assert main(["models", "rm", DEFAULT.name]) == 0
    assert capsys.readouterr().out == f"Removed {DEFAULT.name}, 98 MB.\n{DEFAULT.name} is not on disk.\n"


def test_what_can_be_served_is_listed_by_class(capsys: Capture) -> None:
    assert main(["models", "--supported"]) == 0
    assert tuple(capsys.readouterr().out.split()) == supported_architectures()


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (
            ["pull", "smolm2"],
            1,
            f"The catalogue has no model 'smolm2' (it has: {NAMES}). Did you mean smollm2?",
        ),
        (
            ["rm", "zzz"],
            1,
            f"The catalogue has no model 'zzz' (it has: {NAMES}).",
        ),
        (["pul", "smollm2"], 2, "unknown action 'pul'. Did you mean pull?"),
        (["pull"], 2, f"Say which model: `bough models pull {DEFAULT.name}`."),
        (["list", "smollm2"], 2, "`bough models list` takes no name; it shows all models."),
    ],
)
def test_mistakes(words: list[str], code: int, text: str, capsys: Capture) -> None:
    assert main(["models", *words]) == code
    assert capsys.readouterr().err == f"bough: {text}\n"
