"""What the engine says, in the client's words."""

from __future__ import annotations

import pytest

from bough.core.errors import RequestError
from bough.server.names import client_name, in_names_of, in_spoken_words, speak_also, speak_plainly

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
    with pytest.raises(RequestError) as caught, in_names_of(NAMES):
        raise RequestError(said, field="max_new_tokens")
    assert (caught.value.message, caught.value.field) == (heard, field)
    assert in_spoken_words(said) == heard
    speak_plainly()
    assert in_spoken_words(said) == said


def test_names_that_become_known_later_hold_as_well() -> None:
    with pytest.raises(RequestError, match="tools is too large"), in_names_of({"json_schema": "response_format"}):
        assert client_name("json_schema") == "response_format" and client_name("stop") == "stop"
        speak_also({"json_schema": "tools"})
        raise RequestError("json_schema is too large.")
    speak_plainly()
