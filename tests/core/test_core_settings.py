"""Settings: names, types, ranges, and errors that say what would be right."""

from __future__ import annotations

import pytest

from bough.core.errors import SettingsError
from bough.core.settings import Settings, all_fields


def test_flat_and_grouped_forms_are_the_same() -> None:
    settings = Settings.from_flat({"model": "m", "page_size": 16, "schedule_conservativeness": 1})
    assert settings.model.model_path == "m" and settings.memory.page_size == 16
    assert Settings.from_flat(settings.to_flat()) == settings


def test_names_are_unique_over_all_groups_and_every_one_has_help() -> None:
    names = [f.name for _, f in all_fields()]
    assert len(names) == len(set(names))
    assert all(f.metadata["help"] for _, f in all_fields())


def test_none_means_not_given() -> None:
    assert Settings.from_flat({"page_size": None, "max_total_tokens": None}) == Settings()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"page_siz": 1}, "Did you mean 'page_size'"),
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
    ],
)
def test_what_cannot_be_used_is_refused_by_name(values: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Settings.from_flat(values)
