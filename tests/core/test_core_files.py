"""Paths that people give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bough.core.errors import RequestError, SettingsError
from bough.core.files import home, read_yaml, user_path
from bough.loader.kv_scales import file_scales
from bough.memory.tree.event_key import read_key
from bough.multimodal.sources import _read_file
from bough.scheduler.adapters import find_below

NOBODY = "~nobody-of-this-name/x"


def test_a_user_who_is_there_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/you")
    monkeypatch.setenv("BOUGH_HOME", "~/b")
    assert (user_path("~/a"), user_path(NOBODY), home()) == (Path("/home/you/a"), Path(NOBODY), Path("/home/you/b"))


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (read_yaml, SettingsError),
        (lambda path: file_scales(path, 1), SettingsError),
        (read_key, SettingsError),
        (lambda path: _read_file("a", path, 1), RequestError),
    ],
)
def test_a_file_of_a_user_who_is_not_there_cannot_be_read(read: Callable[[str], Any], error: type[Exception]) -> None:
    with pytest.raises(error) as refused:
        read(NOBODY)
    assert str(refused.value)


def test_a_folder_of_a_user_who_is_not_there_has_no_adapters() -> None:
    assert find_below(NOBODY, "a") is None


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "BOUGH_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as it is where no passwd entry exists
    with pytest.raises(SettingsError, match="names your home folder; set BOUGH_HOME"):
        home()
    monkeypatch.setenv("XDG_CACHE_HOME", ".")
    assert home() == Path("bough")
