"""Settings: names, types, ranges, and errors that say what would be right."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from bough.core.errors import SettingsError
from bough.core.setting_checks import HELP, help_of
from bough.core.settings import (
    ALIASES,
    MODEL_TOKENS,
    NGRAM_TOKENS,
    TREE_STEPS,
    TREE_TOKENS,
    Settings,
    UnbuiltSettings,
    all_fields,
)


def test_flat_and_grouped_forms_are_the_same() -> None:
    settings = Settings.from_flat({"model": "m", "page_size": 16, "schedule_conservativeness": 1})
    assert settings.model.model_path == "m" and settings.memory.page_size == 16
    assert Settings.from_flat(settings.to_flat()) == settings


def test_names_are_unique_over_all_groups_and_every_one_has_help() -> None:
    names = [f.name for _, f in all_fields()]
    assert len(names) == len(set(names))
    assert all(help_of(f) for _, f in all_fields())
    assert not HELP.keys() - {f.name for _, f in all_fields() if not f.metadata["help"]}, "nothing needs these"


def test_the_help_names_the_numbers_that_hold_where_the_user_says_none() -> None:
    assert f"for trees their depth ({TREE_STEPS}) when left out" in HELP["speculative_num_steps"]
    numbers = f"when left out {NGRAM_TOKENS}, with a draft model {MODEL_TOKENS}, with trees {TREE_TOKENS}"
    assert numbers in HELP["speculative_num_draft_tokens"]


def test_none_means_not_given() -> None:
    assert Settings.from_flat({"page_size": None, "max_total_tokens": None}) == Settings()


def test_a_path_is_as_good_as_its_text() -> None:
    settings = Settings.from_flat({"model": Path("m"), "tokenizer_path": Path("t"), "chat_template": Path("c")})
    model = settings.model
    assert (model.model_path, model.tokenizer_path, model.chat_template) == ("m", "t", "c")


def test_an_object_is_as_good_as_its_json() -> None:
    given = {"mm_process_config": {"image": {"max_pixels": 9}}, "limit_mm_data_per_request": {"image": 1}}
    settings = Settings.from_flat(given)
    assert settings.media.mm_process_config == '{"image": {"max_pixels": 9}}'
    assert settings.media.limit_mm_data_per_request == '{"image": 1}'
    assert Settings.from_flat(settings.to_flat()) == settings
    with pytest.raises(SettingsError, match="dtype must be a string, got"):
        Settings.from_flat({"dtype": {"image": 1}})


def test_what_is_not_built_may_be_left_at_its_default() -> None:
    assert Settings.from_flat(dataclasses.asdict(UnbuiltSettings())) == Settings()
    assert Settings.from_flat({"dp_size": None}) == Settings()


def test_flags_of_sglang_that_ask_for_what_is_so_anyway_are_taken() -> None:
    Settings.from_flat({"skip_server_warmup": True, "enable_cache_report": True, "enable_metrics": True})
    Settings.from_flat({"speculative_accept_threshold_single": 1.0, "speculative_ngram_match_type": "PROB"})
    with pytest.raises(SettingsError, match="incremental_streaming_output"):
        Settings.from_flat({"incremental_streaming_output": True})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"page_siz": 1}, "Did you mean 'page_size'"),
        ({"quantization": "awq"}, "leave --quantization out"),
        ({"speculative_accept_threshold_acc": 0.9}, "drafts change what is said"),
        ({"quite_unknown_thing": 1}, "There is no setting"),
        ({"page_size": 3}, "one of 1, 2, 4"),
        ({"page_size": "16"}, "whole number"),
        ({"page_size": True}, "whole number"),
        ({"disable_radix_cache": 1}, "true or false"),
        ({"mem_fraction_static": 1.5}, "at most 1.0"),
        ({"max_total_tokens": 0}, "at least 1"),
        ({"dtype": "float8"}, "float32"),
        ({"schedule_policy": "lpn"}, "Did you mean 'lpm'"),
        ({"model": "a", "model_path": "b"}, "same setting"),
        ({"tp": 2, "tp_size": 4}, "tp and tp_size are the same setting"),
        ({"tp": 2, "tensor_parallel_size": 4}, "and tp_size are the same setting"),
        ({"model_path": 5}, "a string"),
        ({"api_key": ""}, "api_key is empty"),
        ({"admin_api_key": " "}, "admin_api_key is empty"),
        ({"tp_size": 0}, "tp_size must be at least 1"),
        ({"dp_size": 0}, "dp_size must be at least 1"),
        ({"load_balance_method": "follow_bootstrap_room"}, "round_robin, .* auto goes by that"),
        ({"incremental_streaming_output": True}, "incremental_streaming_output: this engine does not have it yet"),
        ({"load_format": "pt"}, r"must be one of auto, .*; got 'pt'\. .*save them as safetensors"),
        ({"load_format": "runai_streamer"}, "safetensors reads the same files"),
        ({"load_format": "remote"}, "Fetch the files first"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(values: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings.from_flat(values)


def test_a_setting_has_the_same_other_names_as_a_keyword_and_as_a_flag() -> None:
    given = {"tp": 2, "data_parallel_size": 3, "pp": None, "nccl_init_addr": "a:1", "ep_size": 2, "ep": 2}
    parallel = Settings.from_flat(given).parallel
    assert (parallel.tp_size, parallel.dp_size, parallel.pp_size, parallel.ep_size) == (2, 3, 1, 2)
    assert parallel.dist_init_addr == "a:1"
    names = {f.name for _, f in all_fields()}
    assert not ALIASES.keys() & names and set(ALIASES.values()) <= names


def test_what_may_hold_a_password_is_not_shown() -> None:
    options = {"url": "redis://:secret@127.0.0.1"}
    given = Settings.from_flat({"api_key": "secret", "hicache_storage_backend_extra_config": options})
    shown = given.to_shown()
    assert "secret" not in str(shown) and shown["hicache_storage_backend_extra_config"] == "***"
    assert Settings().to_shown()["hicache_storage_backend_extra_config"] is None
