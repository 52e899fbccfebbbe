from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The developer's own BOUGH_* variables must not decide what a test sees."""
    for name in list(os.environ):
        if name.startswith("BOUGH_"):
            monkeypatch.delenv(name)
