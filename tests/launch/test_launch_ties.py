"""What happens to an engine's processes when a start is given up, by how far it had come."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from bough.launch import client_end, engine


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("start", ["supervisor.close"]),
        ("open", ["supervisor.expect_endings", "link.send_shutdown", "supervisor.close", "link.close"]),
        ("open_tokenizer", ["supervisor.expect_endings", "link.send_shutdown", "supervisor.close", "link.close"]),
    ],
)
def test_processes_are_told_to_leave_where_there_is_a_way(
    failing: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, endings = Mock(), list[str]()
    for name in ("supervisor.close", "supervisor.expect_endings", "link.send_shutdown", "link.close"):
        parts.configure_mock(**{f"{name}.side_effect": lambda name=name: endings.append(name)})
    processes: Any = Mock(supervisor=parts.supervisor, of_hosts={})
    getattr(parts.link if failing == "open" else processes, failing).side_effect = KeyboardInterrupt
    monkeypatch.setattr(engine, "EngineProcesses", lambda settings, cleanup: processes)
    monkeypatch.setattr(client_end, "Link", lambda addresses: parts.link)
    with pytest.raises(KeyboardInterrupt):
        engine.Engine()
    assert endings == expected


def test_before_anything_was_begun_there_is_nothing_to_undo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "EngineProcesses", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.Engine()
