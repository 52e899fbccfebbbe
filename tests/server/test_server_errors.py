"""Errors and warnings name the fields as the client does."""

from __future__ import annotations

import pytest

from bough.core.errors import RequestError
from bough.server.errors import add_field_names, client_name, failure_of, in_client_names, set_field_names

PLACE = "structural_tag#/format/tags/{}/content/json_schema"
NAMES = {
    "prompt": "text",
    "regex": "guided_regex",
    "max_new_tokens": "max_tokens",
    "structural_tag": "tools",
    PLACE.format(1): "tools[1].parameters",
    PLACE.format(10): "tools[10].parameters",
}


@pytest.mark.parametrize(
    ("said", "heard", "field"),
    [
        (
            "max_new_tokens must be at least min_new_tokens.",
            "max_tokens must be at least min_new_tokens.",
            "max_tokens",
        ),
        ("prompt must be text, not a prompt position.", "text must be text, not a prompt position.", "max_tokens"),
        ("Bad: regex#/x, not a regex.", "Bad: guided_regex#/x, not a regex.", "max_tokens"),
        (
            f"Not all of structural_tag: {PLACE.format(10)}/a/b is odd.",
            "Not all of tools: tools[10].parameters#/a/b is odd.",
            "tools[10].parameters",
        ),
        (
            f"{PLACE.format(1)}#/a is odd, {PLACE.format(10)}/b too.",
            "tools[1].parameters#/a is odd, tools[10].parameters#/b too.",
            "tools[1].parameters",
        ),
        (f"{PLACE.format(1)} is no schema.", "tools[1].parameters is no schema.", "tools[1].parameters"),
        (f"{PLACE.format(2)}/a is odd.", "tools#/format/tags/2/content/json_schema/a is odd.", "max_tokens"),
    ],
)
def test_names_and_places_are_the_clients(said: str, heard: str, field: str) -> None:
    set_field_names(NAMES)
    failure = failure_of(RequestError(said, field="max_new_tokens"))
    assert (failure.message, failure.field) == (heard, field)
    assert in_client_names(said) == heard
    set_field_names({})
    assert in_client_names(said) == said


def test_names_that_become_known_later_hold_as_well() -> None:
    set_field_names({"json_schema": "response_format"})
    assert client_name("json_schema") == "response_format" and client_name("stop") == "stop"
    add_field_names({"json_schema": "tools"})
    assert failure_of(RequestError("json_schema is too large.")).message == "tools is too large."
    set_field_names({})
