from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from bough.cli.commands import Parser
from bough.cli.flags import add_engine_flags, given_settings
from bough.core.errors import SettingsError
from bough.core.setting_checks import OURS, field_type
from bough.core.settings import Settings, all_fields

FIELDS = [f for group, f in all_fields() if group != "unbuilt"]
Field = dataclasses.Field[Any]


def parser() -> Parser:
    built = Parser(program="bough test", about="A test.")
    add_engine_flags(built, server=True)
    return built


def given(*argv: str, **environ: str) -> dict[str, Any]:
    return given_settings(parser().parse(argv), environ)


def other_value(f: Field) -> Any:
    """A legal value that is not the default."""
    plain, _ = field_type(f)
    if f.metadata["choices"] is not None:
        return next(choice for choice in f.metadata["choices"] if choice != f.default)
    if plain is bool:
        return not f.default
    if plain is str:
        return "elsewhere"
    low = f.metadata["low"] or 0
    return plain(low + 0.5) if plain is float else low + 7


def words(f: Field, value: Any, snake: bool = False) -> list[str]:
    name = f.name if snake else f.name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", str(value)]


def config_file(folder: Path, text: str) -> str:
    path = folder / "engine.yaml"
    path.write_text(text)
    return str(path)


CHANGED = {f.name: other_value(f) for f in FIELDS}


@pytest.mark.parametrize("snake", [False, True], ids=["kebab", "snake"])
def test_every_setting_has_a_flag(snake: bool) -> None:
    flags = [word for f in FIELDS for word in words(f, CHANGED[f.name], snake)]
    assert given(*flags) == CHANGED


def test_every_setting_has_a_variable() -> None:
    assert given(**{f"BOUGH_{name.upper()}": str(value) for name, value in CHANGED.items()}) == CHANGED


@pytest.mark.parametrize("kebab", [False, True])
@pytest.mark.parametrize("as_text", [False, True])
def test_every_setting_has_a_key_in_the_file(kebab: bool, as_text: bool, tmp_path: Path) -> None:
    keys = {name.replace("_", "-") if kebab else name: value for name, value in CHANGED.items()}
    file = config_file(tmp_path, yaml.safe_dump({key: str(value) if as_text else value for key, value in keys.items()}))
    assert given("--config", file) == CHANGED


def test_nothing_given_means_the_defaults() -> None:
    assert given() == {}
    assert Settings.from_flat(given_settings(parser().parse([]), {})) == Settings()


def test_flags_win_over_variables_over_the_file(tmp_path: Path) -> None:
    file = config_file(tmp_path, "page-size: 2\ndtype: float32\nlog_level: error\n")
    found = given("--config", file, "--page-size", "8", BOUGH_PAGE_SIZE="4", BOUGH_DTYPE="bfloat16")
    assert found == {"page_size": 8, "dtype": "bfloat16", "log_level": "error"}


def test_a_switch_can_be_turned_off_again_by_its_variable(tmp_path: Path) -> None:
    file = config_file(tmp_path, "disable-radix-cache: true")
    assert given("--config", file, BOUGH_DISABLE_RADIX_CACHE="off") == {"disable_radix_cache": False}


def test_model_is_an_alias_everywhere(tmp_path: Path) -> None:
    assert given("--model", "m") == {"model_path": "m"}
    assert given(BOUGH_MODEL="m") == {"model_path": "m"}
    assert given("--config", config_file(tmp_path, "model: m")) == {"model_path": "m"}


def test_unset_values_are_left_out(tmp_path: Path) -> None:
    file = config_file(tmp_path, "context-length: null\npage-size: ~\n")
    assert given("--config", file, BOUGH_DTYPE="", BOUGH_HOME="/somewhere") == {}


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--page-size", "x"], "page_size must be a whole number, got 'x'."),
        (["--page-size", "3"], "page_size must be one of 1, 2, 4, 8, 16, 32, 64, 128; got 3."),
        (["--dtype", "bfloat"], "dtype must be one of auto, float32, bfloat16, float16; got 'bfloat'. Did you mean"),
        (["--mem-fraction-static", "2"], "mem_fraction_static must be at most 1.0, got 2.0."),
    ],
)
def test_bad_flags_are_told_by_the_settings_own_check(argv: list[str], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        given(*argv)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"BOUGH_PAGE_SIZE": "x"}, "BOUGH_PAGE_SIZE: page_size must be a whole number, got 'x'."),
        ({"BOUGH_STREAM_INTERVAL": "0"}, "BOUGH_STREAM_INTERVAL: stream_interval must be at least 1, got 0."),
        (
            {"BOUGH_ENABLE_MIXED_CHUNK": "perhaps"},
            "BOUGH_ENABLE_MIXED_CHUNK: enable_mixed_chunk must be true or false, got 'perhaps'.",
        ),
    ],
)
def test_bad_variables_are_named(environ: dict[str, str], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        given(**environ)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("page-siz: 16", "there is no setting 'page-siz'. Did you mean page_size?"),
        ("page-size: big", "page_size must be a whole number, got 'big'."),
        ("dtype: 16", "dtype must be a string, got 16."),
        ("page-size: 2\npage_size: 4", "page_size is given twice; keep one of them."),
        ("- page-size", "must hold settings as `name: value` lines"),
        ("", "must hold settings as `name: value` lines"),
        ("a: [1", "is not a YAML file: expected ',' or ']'"),
        ("a: \x07", "is not a YAML file: "),
    ],
)
def test_bad_files_are_named_and_told_in_a_sentence(content: str, text: str, tmp_path: Path) -> None:
    file = config_file(tmp_path, content)
    with pytest.raises(SettingsError) as caught:
        given("--config", file)
    assert str(caught.value).startswith(file)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_told() -> None:
    with pytest.raises(SettingsError, match=r"Cannot read the configuration file none\.yaml: No such file"):
        given("--config", "none.yaml")


def test_a_file_that_is_not_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\xff\xfe")
    with pytest.raises(SettingsError, match="is not UTF-8 text"):
        given("--config", str(path))


def test_help_shows_groups_choices_and_defaults_but_one_spelling_each() -> None:
    text = " ".join(parser().format_help().split())
    for group in dataclasses.fields(Settings):
        assert (group.name.capitalize() + ":" in text) == (group.name != "unbuilt")
    assert "--page-size {1,2,4,8,16,32,64,128}" in text
    assert "(default: lru)" in text
    assert "--no-enable-mixed-chunk" in text
    assert "--page_size" not in text


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--page-siz", "2"], "unknown flag --page-siz. Did you mean --page-size?"),
        (["--page_siz=2"], "unknown flag --page_siz. Did you mean --page-size?"),
        (["--zzzzzz"], "unknown flag --zzzzzz. `bough test --help` lists them all."),
        (["--context-len", "9"], "unknown flag --context-len. Did you mean --context-length?"),
        (["--max-model-len", "9"], "unknown flag --max-model-len. Did you mean --context-length?"),
        (["--gpu_memory_utilization=.9"], "unknown flag --gpu_memory_utilization. Did you mean --mem-fraction-static?"),
        (["--page-size"], "argument --page-size: expected one argument"),
        (["stray"], "unexpected 'stray'. `bough test --help` lists what there is."),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().parse(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"bough test: error: {line}\n"


def test_names_of_other_engines_stand_for_settings_that_there_are() -> None:
    settings = Settings().to_flat().keys()
    assert OURS.keys().isdisjoint(settings) and settings >= set(OURS.values())
    with pytest.raises(SettingsError, match=r"no setting 'max_num_seqs'\. Did you mean 'max_running_requests'\?"):
        Settings.from_flat({"max_num_seqs": 4})


def test_an_unknown_variable_is_mentioned_once_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    theirs = {"BOUGH_HOME": "/models", "BOUGH_GATEWAY_WORKER_API_KEY": "x", "OTHER": "x"}
    environ = {"BOUGH_PAGE_SIZ": "16", "BOUGH_MODEL": "m", **theirs}
    assert given(**environ) == {"model_path": "m"}
    (message,) = caplog.messages
    assert "BOUGH_PAGE_SIZ is no setting" in message and "Did you mean BOUGH_PAGE_SIZE?" in message


@pytest.mark.parametrize(
    "argv", [["--pp-size", "1"], ["--pp", "1", "--data-parallel-size=1"], ["--nnodes", "1", "--node_rank", "0"]]
)
def test_settings_that_are_not_built_may_be_given_at_their_default(argv: list[str]) -> None:
    assert Settings.from_flat(given_settings(parser().parse(argv), {})) == Settings()


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--pp-async-batch-depth", "1"],
            "pp_async_batch_depth: this engine does not have it yet; leave it out or at 0, got 1.",
        ),
        (["--incremental-streaming-output"], "incremental_streaming_output: "),
    ],
)
def test_settings_that_are_not_built_are_refused_by_name(argv: list[str], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_flat(given_settings(parser().parse(argv), {}))
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize("text", ["incremental-streaming-output: false", "incremental_streaming_output: 'false'"])
def test_a_file_may_hold_settings_that_are_not_built(text: str, tmp_path: Path) -> None:
    file = config_file(tmp_path, text)
    assert Settings.from_flat(given("--config", file)) == Settings()
    refused = text.replace("false", "true")
    with pytest.raises(
        SettingsError, match=r"engine\.yaml: incremental_streaming_output: this engine does not have it"
    ):
        given("--config", config_file(tmp_path, refused))


def test_a_variable_may_hold_settings_that_are_not_built(caplog: pytest.LogCaptureFixture) -> None:
    assert Settings.from_flat(given(BOUGH_PP_SIZE="1", BOUGH_DP="1")) == Settings() and not caplog.messages
    with pytest.raises(
        SettingsError,
        match="BOUGH_INCREMENTAL_STREAMING_OUTPUT: incremental_streaming_output: this engine does not have it",
    ):
        given(BOUGH_INCREMENTAL_STREAMING_OUTPUT="1")


@pytest.mark.parametrize("flag", ["--tp-size", "--tp", "--tensor-parallel-size"])
def test_the_number_of_ranks_has_three_names(flag: str) -> None:
    assert Settings.from_flat(given_settings(parser().parse([flag, "2"]), {})).parallel.tp_size == 2


@pytest.mark.parametrize("flag", ["--pp-size", "--pp", "--pipeline-parallel-size"])
def test_the_number_of_stages_has_three_names(flag: str) -> None:
    assert Settings.from_flat(given_settings(parser().parse([flag, "2"]), {})).parallel.pp_size == 2


@pytest.mark.parametrize("flag", ["--dp-size", "--dp", "--data-parallel-size"])
def test_the_number_of_replicas_has_three_names(flag: str) -> None:
    assert Settings.from_flat(given_settings(parser().parse([flag, "2"]), {})).parallel.dp_size == 2
