"""What is found to be wrong before anything is fetched, loaded or started."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from bough.core.errors import SettingsError
from bough.core.settings import Settings
from bough.launch import engine_processes
from bough.launch.engine_processes import EngineProcesses


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ messages[0 }}", "no/such/template.jinja"])
def test_a_chat_template_that_cannot_be_parsed(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "find_files", lambda settings: pytest.fail("the model was looked for"))
    with contextlib.ExitStack() as cleanup, pytest.raises(SettingsError, match="--chat-template"):
        EngineProcesses(Settings.from_flat({"chat_template": template}), cleanup)


@pytest.mark.parametrize("given", ["[]", "{"])
def test_defaults_of_a_template_that_are_no_object(given: str) -> None:
    with (
        contextlib.ExitStack() as cleanup,
        pytest.raises(SettingsError, match="--default-chat-template-kwargs must be a JSON object"),
    ):
        EngineProcesses(Settings.from_flat({"default_chat_template_kwargs": given}), cleanup)


def test_cache_events_of_several_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "find_files", lambda settings: pytest.fail("the model was looked for"))
    with contextlib.ExitStack() as cleanup, pytest.raises(SettingsError, match="leave it out with --dp-size"):
        EngineProcesses(Settings.from_flat({"dp_size": 2, "kv_events_config": "{}"}), cleanup)


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"pp_size": 2, "hicache_storage_backend": "file"}, "--pp-size"),
        ({"disable_radix_cache": True}, "--disable"),
    ],
)
def test_a_tier_below_what_cannot_have_one(flags: dict[str, Any], flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "find_files", lambda settings: pytest.fail("the model was looked for"))
    with contextlib.ExitStack() as cleanup, pytest.raises(SettingsError, match=rf"leave out .*{flag}"):
        EngineProcesses(Settings.from_flat({**flags, "enable_hierarchical_cache": True}), cleanup)


def test_a_store_without_the_tier_above_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "find_files", lambda settings: pytest.fail("the model was looked for"))
    with contextlib.ExitStack() as cleanup, pytest.raises(SettingsError, match="needs --enable-hierarchical-cache"):
        EngineProcesses(Settings.from_flat({"hicache_storage_backend": "file"}), cleanup)


@pytest.mark.parametrize("flags", [{"tp_size": 2, "dp_size": 4}, {"tp_size": 4, "dp_size": 3}, {"dp_size": 2}])
def test_attention_groups_that_ranks_cannot_be_cut_into(flags: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_processes, "find_files", lambda settings: pytest.fail("the model was looked for"))
    sizes = flags["dp_size"], flags.get("tp_size", 1)
    words = "in --dp-size {} groups of ranks; use a number that divides --tp-size {},".format(*sizes)
    with contextlib.ExitStack() as cleanup, pytest.raises(SettingsError, match=words):
        EngineProcesses(Settings.from_flat({**flags, "enable_dp_attention": True}), cleanup)


def test_attention_groups_of_a_pipeline() -> None:
    flags = {"tp_size": 2, "dp_size": 2, "pp_size": 2, "enable_dp_attention": True}
    with contextlib.ExitStack() as cleanup, pytest.raises(SettingsError, match="and leave out --pp-size"):
        EngineProcesses(Settings.from_flat(flags), cleanup)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"enable_dp_attention": True, "tp_size": 2}, "--enable-dp-attention has no effect"),
        ({"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}, "--speculative-num-steps has no effect"),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}, ""),
        ({"enable_dp_attention": True, "tp_size": 2, "dp_size": 2}, ""),
    ],
)
def test_what_has_no_effect_is_said(
    flags: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def looked_for(settings: Any) -> None:
        raise SettingsError("far enough")

    monkeypatch.setattr(engine_processes, "find_files", looked_for)
    with contextlib.ExitStack() as cleanup, pytest.raises(SettingsError, match="far enough"):
        EngineProcesses(Settings.from_flat(flags), cleanup)
    assert [each.message[: len(told)] for each in caplog.records] == ([told] if told else [])
