"""What cannot be split between engines is refused before anything is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from bough.core.errors import SettingsError
from bough.core.settings import Settings
from bough.launch.disaggregation import check_disaggregation, home_of, key_of


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"disaggregation_mode": "decode", "dp_size": 2}, "run several behind"),
        ({"disaggregation_mode": "prefill", "pp_size": 2}, "run several behind"),
        ({"disaggregation_mode": "decode", "disable_radix_cache": True}, "leave it on"),
        ({"prefill_url": "http://a:1"}, "is for --disaggregation-mode decode"),
        ({"disaggregation_mode": "auto"}, "auto needs --prefill-url"),
        ({"disaggregation_mode": "auto", "prefill_url": "a:1", "disable_radix_cache": True}, "mode auto keeps"),
        ({"disaggregation_mode": "decode", "prefill_url": "http://"}, "looks like http://host:port"),
        ({"disaggregation_mode": "prefill", "host": "0.0.0.0"}, "engines of a pair .* in BOUGH_CLUSTER_KEY"),
    ],
)
def test_what_cannot_work_is_refused(flags: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BOUGH_CLUSTER_KEY", raising=False)
    with pytest.raises(SettingsError, match=words):
        check_disaggregation(Settings.from_flat(flags))


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_a_library_that_is_not_installed_is_named(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.from_flat({"disaggregation_mode": "decode", "disaggregation_transfer_backend": backend})
    monkeypatch.setattr("bough.launch.disaggregation.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=rf"backend {backend} needs `pip install 'bough\[{backend}\]'`"):
        check_disaggregation(settings)
    monkeypatch.setattr("bough.launch.disaggregation.find_spec", lambda name: object())
    check_disaggregation(settings)


def test_what_can_work_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_CLUSTER_KEY", "k" * 32)
    check_disaggregation(Settings.from_flat({"disaggregation_mode": "prefill", "host": "0.0.0.0"}))
    settings = Settings.from_flat({"disaggregation_mode": "decode", "prefill_url": "far:30000"})
    check_disaggregation(settings)
    home = home_of(settings)
    assert home is not None and (home.host, home.port) == ("far", 8998)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_on_one_host_the_api_key_takes_the_place_of_a_missing_key(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BOUGH_CLUSTER_KEY", raising=False)
    assert key_of(Settings.from_flat({"disaggregation_mode": mode})) is None
    settings = Settings.from_flat({"disaggregation_mode": mode, "api_key": "secret"})
    assert key_of(settings) == "secret"
    monkeypatch.setenv("BOUGH_CLUSTER_KEY", "k" * 32)
    assert key_of(settings) == "k" * 32


def test_transports_that_are_not_built_are_refused_with_the_way_out() -> None:
    with pytest.raises(SettingsError, match="no such transport; auto takes shm or tcp"):
        Settings.from_flat({"disaggregation_transfer_backend": "mori"})
