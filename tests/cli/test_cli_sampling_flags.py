from __future__ import annotations

from typing import Any

import pytest

from bough.cli.commands import Parser
from bough.cli.flags import add_engine_flags
from bough.cli.sampling_flags import HELP, add_sampling_flags, given_sampling
from bough.core.errors import SettingsError
from bough.core.sampling_params import SamplingParams
from bough.core.settings import all_fields


def given(*argv: str, **defaults: Any) -> dict[str, Any]:
    parser = Parser(program="bough test", about="A test.")
    add_sampling_flags(parser, defaults)
    add_engine_flags(parser)
    return given_sampling(parser.parse(argv), defaults)


def test_every_flag_is_a_sampling_parameter_and_no_setting() -> None:
    assert HELP.keys() <= set(SamplingParams.__struct_fields__)
    assert not HELP.keys() & {f.name for _, f in all_fields()}


def test_what_is_not_given_is_left_out() -> None:
    assert given() == {}
    assert given("--page-size", "4") == {}


def test_values_have_their_types() -> None:
    found = given(
        *("--max-new-tokens", "5", "--temperature", "0", "--top-k", "-1", "--seed", "7", "--n", "2", "--ignore-eos"),
        *("--stop", "a", "--stop", "b c", "--stop-token-ids", "3", "--min_new_tokens", "1"),
    )
    assert found == {
        "max_new_tokens": 5,
        "temperature": 0.0,
        "top_k": -1,
        "sampling_seed": 7,
        "n": 2,
        "ignore_eos": True,
        "stop": ["a", "b c"],
        "stop_token_ids": [3],
        "min_new_tokens": 1,
    }


def test_flags_win_over_the_commands_own_defaults() -> None:
    assert given(max_new_tokens=9) == {"max_new_tokens": 9}
    assert given("--max-new-tokens", "4", max_new_tokens=9) == {"max_new_tokens": 4}


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--top-k", "many"], "top_k must be a whole number, got 'many'."),
        (["--stop-token-ids", "x"], "stop_token_ids must be a whole number, got 'x'."),
        (["--temperature", "-1"], "temperature must be a number between 0 and 1000000, got -1.0."),
        (["--temperature", "nan"], "temperature must be a number between 0 and 1000000, got nan."),
        (["--top-p", "0"], "top_p must be in (0, 1], got 0.0."),
        (["--stop-regex", "("], "stop_regex '(' is not valid"),
    ],
)
def test_bad_values_are_settings_errors(argv: list[str], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        given(*argv)
    assert str(caught.value).startswith(text)


def test_the_help_promises_no_more_than_holds() -> None:
    assert "end-of-sequence or stop token" in HELP["min_new_tokens"]
