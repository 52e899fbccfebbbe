"""Code that requests bring along: what a server and an engine ask for before they take any."""

from __future__ import annotations

import contextlib
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from bough.cli.main import main
from bough.core.custom_code import check_server_code, load_dill
from bough.core.errors import SettingsError
from bough.core.settings import Settings
from bough.launch import engine_processes, service

FLAG = "--enable-custom-logit-processor"
ON = {"enable_custom_logit_processor": True}


@pytest.fixture
def without_dill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dill", None)


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service.http, "listening", lambda settings: pytest.fail("a port was opened"))
    monkeypatch.setattr(engine_processes, "find_files", lambda settings: pytest.fail("the model was looked for"))


@pytest.mark.parametrize("keys", [(), ("--admin-api-key", "a")])
@pytest.mark.usefixtures("nothing_starts")
def test_a_server_takes_code_only_from_those_with_a_key(keys: tuple[str, ...], capsys: Any, monkeypatch: Any) -> None:
    for name in ("BOUGH_API_KEY", "BOUGH_ADMIN_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert main(["serve", FLAG, *keys]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert FLAG in line and "add --api-key" in line


@pytest.mark.parametrize("given", [{}, {"api_key": "k"}, {**ON, "api_key": "k"}])
def test_others_may_start(given: dict[str, Any]) -> None:
    check_server_code(Settings.from_flat(given), keyed="api_key" in given)


@pytest.mark.usefixtures("nothing_starts", "without_dill")
def test_a_server_without_dill_says_so_at_once(capsys: Any) -> None:
    assert main(["serve", FLAG, "--api-key", "k"]) == 2
    assert "pip install 'bough[custom-logit-processor]'" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_starts", "without_dill")
def test_an_engine_needs_no_key_but_dill_and_says_so_at_once() -> None:
    with contextlib.ExitStack() as cleanup, pytest.raises(SettingsError, match=r"bough\[custom-logit-processor\]"):
        engine_processes.EngineProcesses(Settings.from_flat(ON), cleanup)


@pytest.mark.usefixtures("without_dill")
def test_so_does_a_client_that_packs_one() -> None:
    from bough.sampling.custom_logit_processor import CustomLogitProcessor

    with pytest.raises(SettingsError, match=r"pip install 'bough\[custom-logit-processor\]'"):
        CustomLogitProcessor.to_str()


def test_dill_is_an_extra() -> None:
    assert load_dill().loads
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    naming = [name for name, extra in project["optional-dependencies"].items() if any("dill" in each for each in extra)]
    assert naming == ["custom-logit-processor", "dev"] and not any("dill" in each for each in project["dependencies"])
