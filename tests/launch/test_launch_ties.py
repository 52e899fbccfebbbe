"""What happens to an engine's processes when a start is given up, by how far it had come."""

from __future__ import annotations

from typing import Any

import pytest

from bough.launch.engine import _Ties


class Recorder:
    """Stands in for a supervisor or a link."""

    def __init__(self, name: str, calls: list[str], *, is_open: bool = False) -> None:
        self._name, self._calls, self.is_open = name, calls, is_open

    def __getattr__(self, method: str) -> Any:
        return lambda: self._calls.append(f"{self._name} {method}")


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (None, ["supervisor expect_endings", "supervisor end_now", "supervisor close"]),
        ("half open", ["supervisor expect_endings", "supervisor end_now", "supervisor close", "link close"]),
        ("open", ["supervisor expect_endings", "link send_shutdown", "supervisor close", "link close"]),
    ],
)
def test_processes_are_told_to_leave_where_there_is_a_way(link: str | None, expected: list[str]) -> None:
    calls: list[str] = []
    ties: Any = _Ties()
    ties.supervisor = Recorder("supervisor", calls)
    ties.link = None if link is None else Recorder("link", calls, is_open=link == "open")
    ties.undo()
    assert calls == expected


def test_before_anything_was_begun_there_is_nothing_to_undo() -> None:
    _Ties().undo()
