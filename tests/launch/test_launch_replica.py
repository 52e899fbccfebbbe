"""What is found to be wrong before anything is fetched, loaded or started."""

from __future__ import annotations

import contextlib

import pytest

from bough.core.errors import SettingsError
from bough.core.settings import Settings
from bough.launch import replica
from bough.launch.replica import Replica


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ messages[0 }}", "no/such/template.jinja"])
def test_a_chat_template_that_cannot_be_parsed(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "find_files", lambda settings: pytest.fail("the model was looked for"))
    with contextlib.ExitStack() as cleanup, pytest.raises(SettingsError, match="--chat-template"):
        Replica(Settings.from_flat({"chat_template": template}), cleanup)


@pytest.mark.parametrize("given", ["[]", "{"])
def test_defaults_of_a_template_that_are_no_object(given: str) -> None:
    with (
        contextlib.ExitStack() as cleanup,
        pytest.raises(SettingsError, match="--default-chat-template-kwargs must be a JSON object"),
    ):
        Replica(Settings.from_flat({"default_chat_template_kwargs": given}), cleanup)


def test_cache_events_of_several_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "find_files", lambda settings: pytest.fail("the model was looked for"))
    with contextlib.ExitStack() as cleanup, pytest.raises(SettingsError, match="leave it out with --dp-size"):
        Replica(Settings.from_flat({"dp_size": 2, "kv_events_config": "{}"}), cleanup)
